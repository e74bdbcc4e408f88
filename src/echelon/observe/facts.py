"""The facts of a run, read from its folder for a page or a table. Reading never raises; problems become notes.

A run that failed leaves files that are missing, cut off or malformed, and that is the run people ask about. So a value of the
wrong type counts as unknown, and `Facts.notes` lists what could not be read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from echelon.common.files import parse_object, read_bytes
from echelon.contracts.events import survey, survey_into
from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE
from echelon.observe.columns import Columns, Line, finite, moment

__all__ = ["Attempt", "Facts", "FirstFailure", "Status", "children", "get", "read", "size_bytes", "word"]

_MOST_FOLDERS = 10_000  # per checkpoint, which usually has a handful
_INTERRUPTED = (130, 143)  # 128 + SIGINT, 128 + SIGTERM


@dataclass(frozen=True)
class Status:
    """How an attempt ended: a kind, a few words, and the reason if known."""

    kind: Literal["finished", "failed", "stopped", "unknown"]
    text: str
    detail: str = ""


@dataclass(frozen=True)
class FirstFailure:
    """The report of the rank that failed first. None for what it did not report."""

    rank: str | None
    kind: str | None
    message: str | None
    traceback: str | None

    def where(self) -> str:
        return "unknown rank" if self.rank is None else f"rank {self.rank}"

    def one_line(self) -> str:
        lines = (self.message or "").strip().splitlines()
        what = ": ".join(part for part in (self.kind, lines[0][:200] if lines else None) if part)
        return f"{self.where()}: {what or 'no message'}"


@dataclass(frozen=True)
class Attempt:
    """The records of one start of the run. `exit` is None while it runs, and if its launcher was killed."""

    number: int
    exit: Mapping[str, Any] | None
    events: Sequence[Mapping[str, Any]]

    def status(self) -> Status:
        code, failure = get(self.exit, "exit_code"), self.failure()
        if not isinstance(code, int):
            lacks = "exit.json" if self.exit is None else "exit code"
            last = word(self.events[-1].get("event")) if self.events else None
            seen = f"its last event is {last}" if last else "it wrote no events"
            return Status("unknown", "unknown", f"attempt {self.number} has no {lacks}; {seen}")
        if code == 0:
            return Status("finished", "finished")
        if code == REQUEUE or (code in _INTERRUPTED and failure is None):
            return Status("stopped", "stopped", f"exit code {code}")
        return Status("failed", f"failed with code {code}", failure.one_line() if failure else "no rank reported why")

    def failure(self) -> FirstFailure | None:
        first = get(self.exit, "first_failure")
        if not isinstance(first, Mapping):
            return None
        return FirstFailure(*(word(get(first, key)) for key in ("rank", "kind", "message", "traceback")))

    def span(self) -> tuple[float | None, float | None]:
        """Start and end in seconds since the epoch, from exit.json, else from the first and the last event."""
        times = [t for t in (moment(e.get("time")) for e in self.events) if t is not None]
        started, ended = moment(get(self.exit, "started")), moment(get(self.exit, "ended"))
        first, last = (times[0], times[-1]) if times else (None, None)
        return (first if started is None else started, last if ended is None else ended)

    def seconds(self) -> float | None:
        started, ended = self.span()
        return ended - started if started is not None and ended is not None and ended >= started else None

    def explained(self) -> str:
        """The launcher's explanation of the end, in a paragraph; empty if there is none."""
        text = get(self.exit, "explained")
        return text.strip() if isinstance(text, str) else ""

    def first_step(self) -> float | None:
        """The number of completed steps when training began."""
        return next((finite(e.get("step")) for e in self.events if e.get("event") == "train_start"), None)

    def evaluations(self) -> list[tuple[float, float]]:
        """Start and end of each evaluation, in seconds since the epoch."""
        spans, began = [], None
        for event in self.events:
            at = moment(event.get("time"))
            if event.get("event") == "eval_start":
                began = at
            elif event.get("event") == "eval_end" and began is not None and at is not None and at >= began:
                spans.append((began, at))
                began = None
        return spans

    def saved(self) -> list[tuple[float | None, float | None]]:
        """(step, time) of every saved checkpoint, in order; None for a value that an event lacks."""
        return [(finite(e.get("step")), moment(e.get("time"))) for e in self.events if e.get("event") == "checkpoint_saved"]


@dataclass(frozen=True)
class Facts:
    """The records of a run.

    Args:
        name: from run.json, else the folder's name.
        about: run.json; empty if it cannot be read.
        numbers: from metrics.jsonl.
        attempts: in order of their numbers.
        notes: sentences on what is missing, cut off or unreadable.
    """

    name: str
    about: Mapping[str, Any]
    numbers: Columns
    attempts: Sequence[Attempt]
    notes: Sequence[str]

    def points(self, key: str) -> Line:
        """(step, value) of every record with a number under `key`, including nan and inf."""
        return self.numbers.line(key)

    def steps(self) -> tuple[float, float] | None:
        """The first and the last step with a number."""
        ends = [(line.xs[0], line.xs[-1]) for name in self.numbers.names() if (line := self.points(name)).xs]
        return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else None

    def rates(self) -> list[str]:
        """The keys of throughput, the usual ones first."""
        names = {key for key in self.numbers.names() if key.endswith("_per_s")}
        return sorted(names, key=lambda key: (key != "tokens_per_s", key != "samples_per_s", key))

    def status(self) -> Status:
        """The state of the run: how its last attempt ended."""
        return self.attempts[-1].status() if self.attempts else Status("unknown", "unknown", "there is no exit.json")


def read(run: RunDir) -> Facts:
    """Read a run's folder without changing it. A folder that does not exist gives notes only."""
    notes: list[str] = []
    about = _object(run.run_json, "run.json", notes)
    numbers = Columns()
    try:
        notes += [f"metrics.jsonl: {each}" for each in survey_into(run.metrics, numbers.add)]
    except OSError as error:
        notes.append(f"metrics.jsonl {_lacks(error)}.")
    if numbers.dropped:
        notes.append("metrics.jsonl has more names of numbers than are read.")
    attempts: list[Attempt] = []
    for n in (int(p.name) for p in run.attempts() if p.is_dir()):
        there = RunDir(run.path, n)
        label = f"attempts/{there.attempt_path.name}"
        end = _object(there.exit_json, f"{label}/exit.json", notes)
        attempts.append(Attempt(n, end, _records(there.events(0), f"{label}/events.rank0.jsonl", notes)))
    if not attempts:
        notes.append("attempts/ has no attempt.")
    return Facts(
        name=(word(get(about, "name")) or "").strip() or run.path.absolute().name,
        about=about or {},
        numbers=numbers,
        attempts=attempts,
        notes=notes,
    )


def _object(path: Path, label: str, notes: list[str]) -> Mapping[str, Any] | None:
    try:
        value = parse_object(read_bytes(path))
    except OSError as error:
        notes.append(f"{label} {_lacks(error)}.")
        return None
    if value is None:
        notes.append(f"{label} is not a whole JSON object and was left out.")
    return value


def _records(path: Path, label: str, notes: list[str]) -> Sequence[dict[str, Any]]:
    try:
        records, problems = survey(path)
    except OSError as error:
        notes.append(f"{label} {_lacks(error)}.")
        return []
    notes += [f"{label}: {each}" for each in problems]
    return records


def _lacks(error: OSError) -> str:
    return "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"


def children(folder: Path) -> list[Path]:
    """The folders in a folder, by name; empty if it cannot be read."""
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir())
    except OSError:
        return []


def size_bytes(folder: Path) -> int:
    """Total size of the visible files in a folder and below."""
    total = 0
    for place, _, names in islice(os.walk(folder), _MOST_FOLDERS):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # a run that still trains may delete an old checkpoint meanwhile
                continue
    return total


def get(value: object, *keys: str) -> Any:
    """The value under nested keys; None if a key is absent, or a container is not an object."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def word(value: object) -> str | None:
    """A JSON string or number as text; None for anything else."""
    return str(value) if isinstance(value, str | int | float) else None
