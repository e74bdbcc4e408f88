"""What is known of an attempt: how each rank ended, where it was, and which collectives it had called.

`Evidence.of` reads the run's folder, whose files it does not trust.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from echelon.common.files import open_file, read_end
from echelon.contracts.records import exit_record, rank_record
from echelon.contracts.run_dir import RunDir, read_json
from echelon.contracts.stopping import REQUEUE
from echelon.diagnosis import flight as flights
from echelon.diagnosis.aborted import ABORTS, TAIL_BYTES, abort_message, first_signal
from echelon.diagnosis.batch import why_ended
from echelon.diagnosis.failure import Failure
from echelon.diagnosis.flight import Flight
from echelon.diagnosis.folder import is_file, is_folder, object_in
from echelon.diagnosis.nccl_dump import record_in
from echelon.diagnosis.rank import (
    MOST_RANKS,
    NO_COLLECTIVES,
    RankEvidence,
    add_rank,
    add_record,
    fell_in_call,
    later_failure,
    seconds,
    with_error_before,
    with_words_of_log,
)
from echelon.diagnosis.stacks import crash_stack, last_line, logged_error, main_thread, other_threads, waits_in

__all__ = ["Evidence", "RankEvidence"]

_MOST_NOTES = 20
_STACK_BYTES, _FLIGHT_BYTES, _ALL_BYTES = 1 << 20, 16 << 20, 256 << 20  # the last: for all files of an attempt together
# The fields of a record that are used.
_OF_RANK = (
    "exit_code",
    "time_ns",
    "kind",
    "message",
    "user_frames",
    "traceback",
    "ours",
    "code",
    "finished",
    "heard",
    "collectives",
)
_OF_END = ("exit_code", "stopped", "ranks", "seen", "hang", "world_size")
_MOST_GROUPS = 1000
_FILE = re.compile(r"(exit\.rank|stack\.rank|flight\.rank|exit\.node)(\d{1,7})\.(?:json|txt)|(nccl\.rank)(\d{1,7})")


@dataclass(frozen=True)
class Evidence:
    """What is known of an attempt.

    Args:
        world_size: number of ranks; 0 if unknown.
        ranks: by number; a rank of which nothing is known may be missing.
        exit_code: of the attempt; None while it runs, or if its launcher left no record.
        stopped: the launcher's reason for the end, if no rank failed.
        hang_after_s: seconds without progress after which the launcher ended it; None if it did not.
        running: a launcher still holds the run.
        batch: the batch system's reason for ending the job, in its words; empty if there is none.
        notes: files that could not be read.
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
        """Read a run's folder. Missing or malformed files are left out, and links are not followed."""
        return _Reader(RunDir(run, attempt)).read()


class _Reader:
    def __init__(self, run: RunDir) -> None:
        self.run, self.notes, self._left = run, list[str](), _ALL_BYTES
        self.attempt_path = run.attempt_path if is_folder(run.attempt_path.parent) and is_folder(run.attempt_path) else None
        dumps = run.dumps / run.attempt_path.name
        self.dumps = dumps if is_folder(run.dumps) and is_folder(dumps) else None

    def read(self) -> Evidence:
        records, whole = self._exit_records()
        # Without exit.json, the record of a node that gave up waiting for another node tells enough.
        given_up = (r for r in records if r.get("exit_code") == REQUEUE and r.get("stopped"))
        ended = records[0] if whole else next(given_up, {})
        ranks: dict[int, RankEvidence] = {}
        for record in records:
            add_record(ranks, record, self.run)
        own = {number: self._own(path) for number, path in self._files(self.attempt_path, "exit.rank")}
        last_ns = _last_failure_ns(ranks, own) if whole and len(records) == 1 else None
        for number, own_record in own.items():
            if last_ns is None or own_record.get("time_ns", 0) <= last_ns or _has_failed(ranks, number):
                add_rank(ranks, number, own_record, self.run.log(number), final=whole)
        for number, path in self._files(self.dumps, "stack.rank"):
            text = self._content(path, _STACK_BYTES).decode("utf-8", "replace")
            known = ranks.get(number) or RankEvidence(number)
            ranks[number] = replace(known, stack=main_thread(text), threads=other_threads(text))
        dumps = {**dict(self._files(self.dumps, "nccl.rank")), **dict(self._files(self.dumps, "flight.rank"))}
        for number, path in sorted(dumps.items()):
            content = self._content(path, _FLIGHT_BYTES)
            dump = object_in(content.decode("utf-8", "replace")) if path.suffix == ".json" else record_in(content)
            if dump is None:
                self.notes.append(f"{path.name} is no flight record, or too large")
            found_flight = flights.parse(dump) if dump is not None else None
            ranks[number] = replace(
                ranks.get(number) or RankEvidence(number), flight=found_flight, flight_unreadable=dump is None
            )
        for number, rank in list(ranks.items()):
            ranks[number] = self._completed(rank, own.get(number, {}))
        ranks = {number: _still_in_call(rank, ranks) for number, rank in ranks.items()}
        world = max(self._world_size(records), max(ranks, default=-1) + 1)
        code = int(ended["exit_code"]) if ended else None
        return Evidence(
            world,
            self.run.attempt,
            {n: r for n, r in ranks.items() if n < world},
            code,
            str(ended.get("stopped") or ""),
            next((seconds(r["hang"].get("after_s")) for r in records if isinstance(r.get("hang"), dict)), None),
            code is None and self._is_last() and self.run.is_held(),
            why_ended(self.run) if self._is_last() else "",
            (*self.notes[:_MOST_NOTES], *([f"and {more} more"] if (more := len(self.notes) - _MOST_NOTES) > 0 else [])),
        )

    def _completed(self, rank: RankEvidence, own: Mapping[str, Any]) -> RankEvidence:
        """Add what all files of a rank say together."""
        log = self.run.log(rank.rank)
        # No file means that the rank made no call; of a rank that ended well only its last calls are recorded.
        last = own.get("collectives")
        if rank.flight is None and not rank.flight_unreadable and (rank.answers or isinstance(last, dict)):
            rank = replace(rank, flight=flights.of_last_calls(last or {}))
        # A rank that stopped on request may have gone on after its stack was written.
        if not rank.stack or own.get("exit_code") != REQUEUE:
            rank = replace(rank, later=later_failure(rank.rank, own, log))
        failure = rank.failure or rank.later
        if rank.flight and failure is not None and fell_in_call(failure):
            rank = replace(rank, flight=flights.reopened(rank.flight))
        own_end = rank.failure
        if own_end is not None and own_end.kind in ("exit", "SystemExit"):
            with contextlib.suppress(OSError):
                rank = replace(rank, last_line=last_line(read_end(log).decode("utf-8", "replace")))
            if own_end.kind == "exit":
                rank = replace(rank, logged=logged_error(own_end.traceback))
        elif own_end is None and rank.stack:
            with contextlib.suppress(OSError):
                rank = with_words_of_log(rank, read_end(log).decode("utf-8", "replace"))
        if rank.failure is not None and rank.signal not in ("", "SIGKILL"):
            rank = self._crashed(rank, rank.failure)
        return with_error_before(rank)

    def _is_last(self) -> bool:
        attempts = self.run.attempts()
        return not attempts or attempts[-1].name == self.run.attempt_path.name

    def _exit_records(self) -> tuple[list[dict[str, Any]], bool]:
        """The attempt's own record first, then its nodes'; and whether its own could be read."""
        if self.attempt_path is None:
            return [], False
        paths = [self.attempt_path / "exit.json", *(path for _, path in self._files(self.attempt_path, "exit.node"))]
        records = {path: self._record(path, exit_record, _OF_END) for path in paths if is_file(path)}
        self.notes += [f"{path.name} {_why_none(path)}" for path, record in records.items() if record is None]
        return [record for record in records.values() if record is not None], records.get(paths[0]) is not None

    def _record(self, path: Path, read: Callable[[Path], dict[str, Any] | None], names: Iterable[str]) -> dict[str, Any] | None:
        """The used fields of a record; None if reading it would exceed the limit for all files."""
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
        """The files of a kind with their rank or node number, in order."""
        if folder is None:
            return
        names = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                name = _FILE.fullmatch(entry.name)
                if name is not None and kind in name.groups() and (number := int(name[2] or name[4])) < MOST_RANKS:
                    names.append((number, folder / entry.name))
        yield from sorted(names)

    def _content(self, path: Path, most: int) -> bytes:
        most = min(most, self._left)
        try:
            with open(open_file(path), "rb") as file:
                content = file.read(most)
        except OSError as error:
            self.notes.append(f"{path.name} cannot be read: {error.strerror}")
            return b""
        self._left -= len(content)
        return content

    def _crashed(self, rank: RankEvidence, failure: Failure) -> RankEvidence:
        """Add what the process wrote into its log as it died."""
        with contextlib.suppress(OSError):
            log = read_end(self.run.log(rank.rank), TAIL_BYTES).decode("utf-8", "replace")
            if rank.signal in ABORTS and "\n" not in failure.message and (words := abort_message(log)):
                failure = replace(failure, message=f"{failure.message}\n{words}", traceback=words)
            failure = replace(failure, kind=first_signal(rank.signal, log))
            return replace(rank, stack=rank.stack or crash_stack(log), failure=failure)
        return rank

    def _world_size(self, records: list[dict[str, Any]]) -> int:
        sizes = [record.get("world_size") for record in records] + [(read_json(self.run.run_json) or {}).get("ranks")]
        return next((n for n in sizes if type(n) is int and 0 < n <= MOST_RANKS), 0)


def _still_in_call(rank: RankEvidence, ranks: Mapping[int, RankEvidence]) -> RankEvidence:
    """Reopen the rank's last call if its stack still stands in it.

    Gloo's records mark a call as ended as soon as the connection to a dead peer breaks, shortly before the call raises. A call
    that another rank has not reached cannot have ended in any other way.
    """
    name = waits_in(rank.stack)
    if not rank.flight or not name or name in NO_COLLECTIVES or (last := flights.last_call(rank.flight)) is None:
        return rank
    group, call = last
    members = rank.flight[group].members or ranks.keys()
    others = [ranks[other].flight for other in members if other != rank.rank and other in ranks]
    behind = any(flight is not None and (trace := flight.get(group)) and trace.last < call.seq for flight in others)
    if call.done and behind and not flights.ROOTED.search(call.op):
        return replace(rank, flight=flights.reopened(rank.flight))
    return rank


def _has_failed(ranks: Mapping[int, RankEvidence], number: int) -> bool:
    return number in ranks and ranks[number].failure is not None


def _last_failure_ns(ranks: Mapping[int, RankEvidence], own: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Time of the last recorded failure, on the clock of the ranks' machine; None if there is none, or one has no time.

    A rank that wrote its own record later failed because it was ended with the others.
    """
    failed = [number for number, rank in ranks.items() if rank.failure is not None]
    times = [own[number]["time_ns"] for number in failed if "time_ns" in own.get(number, {})]
    return max(times) if times and len(times) == len(failed) else None


def _why_none(path: Path) -> str:
    """Why an existing file gave no record. A run's files are readable by its user alone."""
    try:
        with path.open("rb"):
            return "is no record of an end"
    except PermissionError:
        return f"may not be read by this user, but by {_owner(path)}: run the command as that user"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (OSError, KeyError):
        return "its owner"
