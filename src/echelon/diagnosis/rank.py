"""What is known of one rank, and how records are read."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.contracts.pulse import Phase, RankProgress
from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE
from echelon.diagnosis.failure import Failure
from echelon.diagnosis.flight import Flight
from echelon.diagnosis.lost_peers import error_before
from echelon.diagnosis.stacks import Frame, last_traceback, logged_error, lost_thread, of_traceback, unsent_batch, waits_in

__all__ = [
    "MOST_RANKS",
    "NO_COLLECTIVES",
    "RankEvidence",
    "add_rank",
    "add_record",
    "fell_in_call",
    "is_check",
    "later_failure",
    "seconds",
    "with_error_before",
    "with_words_of_log",
]

MOST_RANKS = 1 << 20
# Calls that wait for others and are not in a flight record.
NO_COLLECTIVES = frozenset(
    ("a DataLoader", "batch_isend_irecv", "destroy_process_group", "init_process_group", "irecv", "isend", "monitored_barrier")
    + ("new_group", "new_subgroups", "recv", "recv_object_list", "rendezvous", "send", "send_object_list")
)
# torch's checks under TORCH_DISTRIBUTED_DEBUG=DETAIL, which run before the call that they check.
_BEFORE_CALL = re.compile("monitoredBarrier|Detected mismatch between collectives")
# A collective's own check of its input: any rank of the group may be at fault.
_OF_COLLECTIVES = re.compile(
    r"op\.preamble\.length|Detected mismatch between collectives|"
    r"enforce fail at (?![^\n]{0,300}gloo/transport/\w+/(device|address|listener|socket)\.)[^\n]{0,300}\bgloo\b"
)
# Conclusions of the launcher, recorded in place of how the rank failed.
_VERDICTS = ("stopped", "behind", "hang")
_SAID = re.compile(r"^([A-Za-z_][\w.]{0,200})(?:: (.*))?$")


@dataclass(frozen=True)
class RankEvidence:
    """What is known of one rank.

    Args:
        failure: how it failed; None if it did not, or only because it was ended with the others.
        later: how it failed once the attempt's end had been recorded.
        ended: exit code of a rank that ended without failing; None if it ran.
        heard: the signal that asked an ended rank to stop; empty if it got none itself.
        finished: an ended rank had destroyed its process group, at its program's own end.
        oom: the kernel's out-of-memory killer ended it.
        standing: its progress in the loop; None if it has no loop, or nothing is known.
        stopped: its process existed but did not run.
        silent_s: seconds since it gave a sign.
        answers: whether its interpreter still ran; None if it was not asked.
        where: its innermost frame in the user's code, if no stack is there.
        stack: of its main thread, innermost first, when it was asked or when it crashed.
        threads: where its other threads were then, in the user's code.
        flight: its collectives; None if it left no record.
        flight_unreadable: it left a flight record that could not be read.
        thread: if the rank hung: the error that ended one of its threads.
        loader_error: if it waited for a DataLoader: the error of a worker that could not send its batch.
        logged: the last error in its log, if nothing else is known; the rank may have caught it and gone on.
        last_line: of the log of one that ended itself, if nothing in it is an error.
        raised: an exception that it was handling, or raised, before a call in `finally` failed; no fault by itself. None if none.
    """

    rank: int
    failure: Failure | None = None
    later: Failure | None = None
    ended: int | None = None
    finished: bool = False
    heard: str = ""
    oom: bool = False
    standing: RankProgress | None = None
    stopped: bool = False
    silent_s: float | None = None
    answers: bool | None = None
    where: str = ""
    stack: tuple[Frame, ...] = ()
    threads: tuple[Frame, ...] = ()
    flight: Flight | None = None
    flight_unreadable: bool = False
    thread: str = ""
    loader_error: str = ""
    logged: str = ""
    last_line: str = ""
    raised: Failure | None = None

    @property
    def exit_code(self) -> int | None:
        return self.failure.exit_code if self.failure is not None else self.ended

    @property
    def signal(self) -> str:
        """Such as "SIGKILL"; empty if no signal ended it."""
        kind = self.failure.kind if self.failure is not None else ""
        return kind if kind.startswith("SIG") and kind in signal.Signals.__members__ else ""

    @property
    def is_known(self) -> bool:
        """Whether its position in the loop is."""
        return self.standing is not None and self.standing.phase not in (Phase.NONE, Phase.ENDED)


def add_record(ranks: dict[int, RankEvidence], record: Mapping[str, Any], run: RunDir) -> None:
    """Add what the record of an attempt's end, or of a node's part of it, says of each rank. The first entry counts."""
    for number, entry in record.get("seen", {}).items():
        if len(number) < 8 and int(number) not in ranks and int(number) < MOST_RANKS:
            step, phase, evaluated, beats = entry["at"]
            standing = RankProgress(step, Phase(phase), evaluated, beats)
            silent_s = seconds(entry.get("silent_s"))
            raised = entry.get("raised") and Failure.from_record(int(number), 1, 0, entry["raised"], run.log(int(number)))
            rank = RankEvidence(int(number), standing=standing, stopped=entry["stopped"], silent_s=silent_s, raised=raised)
            ended = 0 if entry.get("ended") == 0 else None
            ranks[rank.rank] = replace(rank, where=entry["where"][:500], answers=entry.get("answers"), ended=ended)
    for entry in record.get("ranks", {}).values():
        number = entry["rank"]
        known = ranks.get(number) or RankEvidence(number)
        if number >= MOST_RANKS or known.failure is not None:
            continue
        if entry["kind"] in _VERDICTS:
            ranks[number] = replace(known, stopped=known.stopped or entry["kind"] == "stopped")
        else:
            failure = replace(Failure.from_json(entry), log=run.log(number))
            ranks[number] = replace(known, failure=failure, oom=entry.get("oom") is True)


def add_rank(ranks: dict[int, RankEvidence], number: int, record: Mapping[str, Any], log: Path, *, final: bool) -> None:
    """Add a rank's own record. If the attempt's end was recorded, a failure missing there came after the others' failures.

    A rank that was still running when all ranks were examined ended well only because it was asked to stop afterwards.
    """
    code = record.get("exit_code")
    known = ranks.get(number) or RankEvidence(number)
    if code in (0, REQUEUE) and known.failure is None and known.answers is None and not known.stopped:
        ranks[number] = replace(known, ended=code, finished=record.get("finished") is True, heard=record.get("heard", "")[:20])
    elif code and not final and known.failure is None:
        ranks[number] = replace(known, failure=Failure.from_record(number, code, 0, record, log))


def later_failure(number: int, record: Mapping[str, Any], log: Path) -> Failure | None:
    """How a rank failed after the attempt's end had been recorded: only as a victim, but the traceback shows where it was."""
    code = record.get("exit_code")
    return Failure.from_record(number, code, 0, record, log) if code and "traceback" in record else None


def fell_in_call(failure: Failure) -> bool:
    """Whether a rank failed in a collective, as ranks do that lose a peer there."""
    if _BEFORE_CALL.search(failure.message[:20_000]):
        return False
    name = waits_in(of_traceback(failure.traceback))
    raised = not failure.kind.startswith("SIG")  # NCCL's own records of an aborted rank show which calls have ended
    return name not in NO_COLLECTIVES and (bool(name) or (raised and failure.is_victim))


def is_check(failure: Failure) -> bool:
    """Whether a collective rejected its input, for which any of its ranks may be at fault."""
    return failure.kind != "SIGKILL" and _OF_COLLECTIVES.search(f"{failure.kind}: {failure.message}"[:20_000]) is not None


def with_words_of_log(rank: RankEvidence, log: str) -> RankEvidence:
    """Add errors of its threads and data workers from the log: they end no rank, but the rank waits for their result."""
    name = waits_in(rank.stack)
    if name == "a DataLoader":
        rank = replace(rank, loader_error=unsent_batch(log))
    elif not name:
        rank = replace(rank, thread=lost_thread(log))
    return rank if rank.loader_error or rank.thread else replace(rank, logged=logged_error(last_traceback(log)))


def with_error_before(rank: RankEvidence) -> RankEvidence:
    """Add the error that it was handling when it lost a peer or a collective rejected its call, by its traceback."""
    failure = rank.raised or rank.failure or rank.later
    if failure is None or not (failure.is_victim or is_check(failure)):
        return rank
    rank = replace(rank, raised=None)
    text = error_before(failure.traceback)
    first = next((match for line in text.splitlines() if (match := _SAID.match(line)) is not None), None)
    if first is None:
        return rank
    kind, message = first[1].rpartition(".")[2], first[2] or ""
    return replace(rank, raised=replace(failure, kind=kind, message=message, user_frames=(), traceback=text, ours=False))


def seconds(value: Any) -> float | None:
    """A record's value as seconds; None if it is not a valid time."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1e9 else None
