"""What is known of an attempt: of every rank how it ended, where it stood and what it had called.

`Evidence.of` reads it from a run's folder, as if somebody else had written that.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from echelon.contracts.files import open_file, read_end
from echelon.contracts.pulse import Phase, Standing
from echelon.contracts.run_dir import RunDir, read_json
from echelon.contracts.stopping import REQUEUE
from echelon.launcher.aborted import TAIL_BYTES, last_words
from echelon.launcher.explain import flight as flights
from echelon.launcher.explain.batch import why_ended
from echelon.launcher.explain.flight import Flight
from echelon.launcher.explain.folder import is_file, is_folder, is_held, object_in
from echelon.launcher.explain.stacks import Frame, crash_stack, lost_thread, main_thread, of_traceback, waits_in
from echelon.launcher.job import Failure
from echelon.launcher.records import exit_record, rank_record

__all__ = ["Evidence", "RankEvidence"]

_MOST_RANKS, _MOST_NOTES = 1 << 20, 20
_STACK_BYTES, _FLIGHT_BYTES, _ALL_BYTES = 1 << 20, 16 << 20, 256 << 20  # the last: of all files of an attempt together
# What is used of a record, whatever else it holds.
_OF_RANK = ("exit_code", "time_ns", "kind", "message", "user_frames", "traceback", "ours", "finished", "collectives")
_OF_END = ("exit_code", "stopped", "ranks", "seen", "hang", "world_size")
_MOST_GROUPS = 1000
_FILE = re.compile(r"(exit\.rank|stack\.rank|flight\.rank|exit\.node)(\d{1,7})\.(json|txt)")
# What waits for others, and is not in a flight record.
_NO_COLLECTIVES = frozenset(
    ("a DataLoader", "batch_isend_irecv", "destroy_process_group", "init_process_group", "irecv", "isend", "monitored_barrier")
    + ("new_group", "new_subgroups", "recv", "recv_object_list", "rendezvous", "send", "send_object_list")
)
# torch's checks under TORCH_DISTRIBUTED_DEBUG=DETAIL, which come before the call that they are about.
_BEFORE_CALL = re.compile("monitoredBarrier|Detected mismatch between collectives")
_LEFT = re.compile(r"\(rank (\d{1,7}(?:, \d{1,7}){0,200}) had ended before, with exit code 0: ")
# What a launcher concluded itself, in place of how the rank failed.
_VERDICTS = ("stopped", "behind", "hang")


@dataclass(frozen=True)
class RankEvidence:
    """What is known of one rank.

    Args:
        failure: how it failed; None if it did not, or only because it was ended with the others.
        later: how it failed once the attempt's end had been recorded.
        ended: exit code of a rank that ended without failing; None if it ran.
        finished: such a one had destroyed its process group, at its program's own end.
        oom: the kernel's out-of-memory killer ended it.
        standing: how far its loop was; None if it has none, or nothing is known.
        stopped: its process existed and did not run.
        silent_s: seconds since it gave a sign.
        answers: whether its interpreter still ran; None if it was not asked.
        where: its innermost frame in the user's code, if no stack is there.
        stack: of its main thread, innermost first, at the time when it was asked, or of its crash.
        flight: its collectives; None if it left no record.
        unread: it left one that could not be read.
        thread: of one that stood: the error that ended a thread of it.
    """

    rank: int
    failure: Failure | None = None
    later: Failure | None = None
    ended: int | None = None
    finished: bool = False
    oom: bool = False
    standing: Standing | None = None
    stopped: bool = False
    silent_s: float | None = None
    answers: bool | None = None
    where: str = ""
    stack: tuple[Frame, ...] = ()
    flight: Flight | None = None
    unread: bool = False
    thread: str = ""

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


@dataclass(frozen=True)
class Evidence:
    """What is known of an attempt.

    Args:
        world_size: how many ranks there were; 0 if nothing says so.
        ranks: by number; those of which nothing is known may lack.
        exit_code: of the attempt; None while it runs, or if its launcher ended without a word.
        stopped: what ended it, if no rank did, in the launcher's words.
        hang_after_s: seconds without progress after which the launcher ended it; None if it did not.
        running: a launcher has the run and has not ended it.
        batch: why the batch system ended the job, in its words; empty if it did not.
        notes: what could not be read.
    """

    world_size: int
    attempt: int = 0
    ranks: Mapping[int, RankEvidence] = field(default_factory=dict)
    exit_code: int | None = None
    stopped: str = ""
    hang_after_s: float | None = None
    running: bool = False
    batch: str = ""
    notes: tuple[str, ...] = ()

    def rank(self, number: int) -> RankEvidence:
        return self.ranks.get(number) or RankEvidence(number)

    @property
    def all_ranks(self) -> range:
        return range(self.world_size)

    @property
    def failures(self) -> list[Failure]:
        return [r.failure for _, r in sorted(self.ranks.items()) if r.failure is not None]

    @property
    def flights(self) -> dict[int, Flight]:
        return {number: r.flight for number, r in self.ranks.items() if r.flight is not None}

    @classmethod
    def of(cls, run: str | os.PathLike[str], attempt: int) -> Evidence:
        """From a run's folder. What is not there, or not as it should be, is left out; nothing is read through a link."""
        return _Reader(RunDir(run, attempt)).read()


class _Reader:
    def __init__(self, run: RunDir) -> None:
        self.run, self.notes, self._left = run, list[str](), _ALL_BYTES
        self.here = run.attempt_path if is_folder(run.attempt_path.parent) and is_folder(run.attempt_path) else None
        dumps = run.dumps / run.attempt_path.name
        self.dumps = dumps if is_folder(run.dumps) and is_folder(dumps) else None

    def read(self) -> Evidence:
        records, whole = self._exit_records()
        ended = records[0] if whole else {}
        ranks: dict[int, RankEvidence] = {}
        for record in records:
            _add_record(ranks, record, self.run)
        own = {number: self._own(path) for number, path in self._files(self.here, "exit.rank")}
        last_ns = _last_failure_ns(ranks, own) if whole and len(records) == 1 else None
        for number, found in own.items():
            if last_ns is None or found.get("time_ns", 0) <= last_ns or _has_failed(ranks, number):
                _add_rank(ranks, number, found, self.run.log(number), final=whole)
        for number, path in self._files(self.dumps, "stack.rank"):
            text = self._text(path, _STACK_BYTES)
            ranks[number] = replace(ranks.get(number) or RankEvidence(number), stack=main_thread(text))
        for number, path in self._files(self.dumps, "flight.rank"):
            dump = object_in(self._text(path, _FLIGHT_BYTES))
            if dump is None:
                self.notes.append(f"{path.name} is no flight record, or too large")
            found_flight = flights.parse(dump) if dump is not None else None
            ranks[number] = replace(ranks.get(number) or RankEvidence(number), flight=found_flight, unread=dump is None)
        for number, rank in list(ranks.items()):
            # Without a call there is no file; and of a rank that ended well only the last calls are known.
            last = own.get(number, {}).get("collectives")
            if rank.flight is None and not rank.unread and (rank.answers or isinstance(last, dict)):
                ranks[number] = rank = replace(rank, flight=flights.of_last_calls(last or {}))
            ranks[number] = rank = replace(rank, later=_later_failure(number, own.get(number, {}), self.run.log(number)))
            failure = rank.failure or rank.later
            if rank.flight and failure is not None and _fell_in_call(failure):
                ranks[number] = rank = replace(rank, flight=flights.reopened(rank.flight))
            if rank.failure is None and rank.stack and not waits_in(rank.stack):
                with contextlib.suppress(OSError):
                    ranks[number] = replace(rank, thread=lost_thread(read_end(self.run.log(number)).decode("utf-8", "replace")))
            if rank.failure is not None and rank.signal not in ("", "SIGKILL"):
                ranks[number] = self._crashed(rank, rank.failure)
        for number in _left_while_others_waited(ranks):
            if number in ranks or number < self._world_size(records):
                ranks[number] = replace(ranks.get(number) or RankEvidence(number), ended=0)
        world = max(self._world_size(records), max(ranks, default=-1) + 1)
        code = int(ended["exit_code"]) if whole else None
        return Evidence(
            world,
            self.run.attempt,
            {n: r for n, r in ranks.items() if n < world},
            code,
            str(ended.get("stopped") or ""),
            next((_seconds(r["hang"].get("after_s")) for r in records if isinstance(r.get("hang"), dict)), None),
            code is None and self._is_last() and is_held(self.run.path / ".lock"),
            why_ended(self.run) if self._is_last() else "",
            (*self.notes[:_MOST_NOTES], *([f"and {more} more"] if (more := len(self.notes) - _MOST_NOTES) > 0 else [])),
        )

    def _is_last(self) -> bool:
        attempts = self.run.attempts()
        return not attempts or attempts[-1].name == self.run.attempt_path.name

    def _exit_records(self) -> tuple[list[dict[str, Any]], bool]:
        """The attempt's own first, then its nodes'; and whether its own is there and could be read."""
        if self.here is None:
            return [], False
        paths = [self.here / "exit.json", *(path for _, path in self._files(self.here, "exit.node"))]
        found = {path: self._record(path, exit_record, _OF_END) for path in paths if is_file(path)}
        self.notes += [f"{path.name} is no record of an end" for path, record in found.items() if record is None]
        return [record for record in found.values() if record is not None], found.get(paths[0]) is not None

    def _record(self, path: Path, read: Callable[[Path], dict[str, Any] | None], names: Iterable[str]) -> dict[str, Any] | None:
        """What is used of a record, if there is room for it among all that is read."""
        try:
            size = os.lstat(path).st_size
        except OSError:
            return None
        if size > self._left:
            self.notes.append(f"{path.name} was not read: there is too much")
            return None
        self._left -= size
        record = read(path)
        return None if record is None else {name: record[name] for name in names if name in record}

    def _own(self, path: Path) -> dict[str, Any]:
        record = self._record(path, rank_record, _OF_RANK) or {}
        calls = record.get("collectives")
        return {**record, "collectives": dict(islice(calls.items(), _MOST_GROUPS))} if calls else record

    def _files(self, folder: Path | None, kind: str) -> Iterator[tuple[int, Path]]:
        """The files of a kind, by their number; in order."""
        if folder is None:
            return
        names = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                name = _FILE.fullmatch(entry.name)
                if name is not None and name[1] == kind and int(name[2]) < _MOST_RANKS:
                    names.append((int(name[2]), folder / entry.name))
        yield from sorted(names)

    def _text(self, path: Path, most: int) -> str:
        most = min(most, self._left)
        try:
            with open(open_file(path), "rb") as file:
                content = file.read(most)
        except OSError as error:
            self.notes.append(f"{path.name} cannot be read: {error.strerror}")
            return ""
        self._left -= len(content)
        return content.decode("utf-8", "replace")

    def _crashed(self, rank: RankEvidence, failure: Failure) -> RankEvidence:
        """With what the process wrote into its log as it died."""
        with contextlib.suppress(OSError):
            log = read_end(self.run.log(rank.rank), TAIL_BYTES).decode("utf-8", "replace")
            if rank.signal == "SIGABRT" and "\n" not in failure.message and (words := last_words(log)):
                failure = replace(failure, message=f"{failure.message}\n{words}", traceback=words)
            return replace(rank, stack=rank.stack or crash_stack(log), failure=failure)
        return rank

    def _world_size(self, records: list[dict[str, Any]]) -> int:
        told = [record.get("world_size") for record in records] + [(read_json(self.run.run_json) or {}).get("ranks")]
        return next((n for n in told if type(n) is int and 0 < n <= _MOST_RANKS), 0)


def _add_record(ranks: dict[int, RankEvidence], record: Mapping[str, Any], run: RunDir) -> None:
    """What the record of an attempt's end, or of a node's part of it, says of each rank. The first that says something counts."""
    for number, said in record.get("seen", {}).items():
        if len(number) < 8 and int(number) not in ranks and int(number) < _MOST_RANKS:
            step, phase, evaluated, beats = said["at"]
            standing = Standing(step, Phase(phase), evaluated, beats)
            silent_s = _seconds(said.get("silent_s"))
            rank = RankEvidence(int(number), standing=standing, stopped=said["stopped"], silent_s=silent_s)
            ranks[rank.rank] = replace(rank, where=said["where"][:500], answers=said.get("answers"))
    for said in record.get("ranks", {}).values():
        number = said["rank"]
        known = ranks.get(number) or RankEvidence(number)
        if number >= _MOST_RANKS or known.failure is not None:
            continue
        if said["kind"] in _VERDICTS:
            ranks[number] = replace(known, stopped=known.stopped or said["kind"] == "stopped")
        else:
            failure = replace(Failure.from_json(said), log=run.log(number))
            ranks[number] = replace(known, failure=failure, oom=said.get("oom") is True)


def _add_rank(ranks: dict[int, RankEvidence], number: int, said: Mapping[str, Any], log: Path, *, final: bool) -> None:
    """What a rank wrote itself. If the attempt's end was recorded, a failure that is not in that came after the others'.

    One that was seen to run when all were gathered ended well only because it was then asked to.
    """
    code = said.get("exit_code")
    known = ranks.get(number) or RankEvidence(number)
    if code in (0, REQUEUE) and known.failure is None and known.answers is None and not known.stopped:
        ranks[number] = replace(known, ended=code, finished=said.get("finished") is True)
    elif code and not final and known.failure is None:
        ranks[number] = replace(known, failure=Failure.from_record(number, code, 0, said, log))


def _later_failure(number: int, said: Mapping[str, Any], log: Path) -> Failure | None:
    """How a rank failed after the attempt's end had been recorded: as a victim, and yet it tells where that one was."""
    code = said.get("exit_code")
    return Failure.from_record(number, code, 0, said, log) if code and "traceback" in said else None


def _fell_in_call(failure: Failure) -> bool:
    """Whether a rank failed in a collective, as all do that lose a peer there."""
    if _BEFORE_CALL.search(failure.message[:20_000]):
        return False
    name = waits_in(of_traceback(failure.traceback))
    raised = not failure.kind.startswith("SIG")  # NCCL's own records, of ranks that it aborts, say themselves what has ended
    return name not in _NO_COLLECTIVES and (bool(name) or (raised and failure.is_victim))


def _left_while_others_waited(ranks: Mapping[int, RankEvidence]) -> set[int]:
    """By the launcher's own words below the error of one that waited: of a rank that left no record, as after `os._exit(0)`."""
    found = set[int]()
    for rank in ranks.values():
        said = _LEFT.search(rank.failure.message[-2000:]) if rank.failure is not None else None
        found |= set(map(int, said[1].split(", "))) if said else set()
    return {number for number in found if number not in ranks or ranks[number].failure is None}


def _has_failed(ranks: Mapping[int, RankEvidence], number: int) -> bool:
    return number in ranks and ranks[number].failure is not None


def _last_failure_ns(ranks: Mapping[int, RankEvidence], own: Mapping[int, Mapping[str, Any]]) -> int | None:
    """When the last of the recorded failures was, on the clock of the ranks' machine; None without any, or if one did not say.

    What a rank wrote later, it wrote because it was ended with the others.
    """
    failed = [number for number, rank in ranks.items() if rank.failure is not None]
    times = [own[number]["time_ns"] for number in failed if "time_ns" in own.get(number, {})]
    return max(times) if times and len(times) == len(failed) else None


def _seconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1e9 else None
