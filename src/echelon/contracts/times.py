"""Where a rank's time goes: one line of JSON every few seconds, in `attempts/NNN/times.rankN.jsonl`.

    {"steps": [10, 30], "wall_s": 2.0, "data_s": 0.1, "forward_s": 0.6, "backward_s": 0.9, "optimizer_s": 0.1, "wait_s": 0.2,
     "checkpoint_s": 0.0, "eval_s": 0.0, "other_s": 0.1, "gc_s": 0.0, "disk_s": 0.0, "queue_s": 0.0, "own_s": 0.085,
     "line": "train.py:41 in load", "host": "node7", "role": "", "time": 1764000000.0}

A rank's records follow each other without a gap, from the beginning of a training loop to its end. All durations are those of the
main thread, by the rank's own clock. `time` is the end of the record in seconds since the epoch: use it for drawing, never to
compare ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from echelon.common.files import open_file
from echelon.contracts.events import LineReader
from echelon.contracts.run_dir import RunDir

__all__ = ["PARTS", "TimeRecord", "TimesReader", "parse", "ranks_of", "read_times", "records_of"]

# The parts of `wall_s`, in the order shown.
PARTS = ("data_s", "forward_s", "backward_s", "optimizer_s", "wait_s", "checkpoint_s", "eval_s", "other_s")

_NAME = re.compile(r"times\.rank(0|[1-9][0-9]{0,6})\.jsonl")
_LONGEST_S = 1e8  # three years
_LONGEST_TEXT = 300
_MOST_BYTES = 64 << 20  # read from the end of a rank's file: a run of a month has less
_MOST_RANKS = 65_536


@dataclass(frozen=True)
class TimeRecord:
    """A section of a rank's loop.

    Args:
        steps: training steps completed before and after it: [10, 30] is 20 steps. Equal if no step ended in it, or if the run was
            rolled back to an older step.
        wall_s: its duration, the sum of the eight `PARTS`.
        data_s: waiting for batches, and moving them to the device.
        forward_s, backward_s, optimizer_s: time in steps, without waits for other ranks. In a step of the user's own code they
            are estimates from 40 samples of the stack per record.
        wait_s: waiting for other ranks, in collectives.
        checkpoint_s: time for which the loop stopped for a checkpoint.
        eval_s: evaluations between steps.
        other_s: callbacks, hooks, and all else that a loop does between steps.
        gc_s: share of these parts spent in Python's garbage collector.
        disk_s: share of these parts spent waiting for a file system.
        queue_s: share of these parts in which the thread was ready to compute while other programs had the cores.
        own_s: a usual step (the median) without `wait_s` and `queue_s`: higher for a straggler. 0 is unknown.
        startup_s: in a process's first record: time that it ran before this loop began. Not part of `wall_s`.
        line: the line of the user's code with most of its own time: "train.py:41 in load". Empty if unknown.
        host: the rank's machine.
        role: its part of the work, if ranks have different ones, such as a pipeline stage. Only ranks of the same role can be
            compared.
        time: its end, in seconds since the epoch, by this machine's clock.
    """

    steps: tuple[int, int]
    wall_s: float
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    wait_s: float = 0.0
    checkpoint_s: float = 0.0
    eval_s: float = 0.0
    other_s: float = 0.0
    gc_s: float = 0.0
    disk_s: float = 0.0
    queue_s: float = 0.0
    own_s: float = 0.0
    startup_s: float = 0.0
    line: str = ""
    host: str = ""
    role: str = ""
    time: float = 0.0

    @property
    def count(self) -> int:
        """Number of steps that ended in it."""
        return self.steps[1] - self.steps[0]

    def to_json(self) -> dict[str, Any]:
        """The written form: rounded to microseconds, without fields that are zero or empty."""
        record = {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return {name: value for name, value in record.items() if value or name in ("steps", "wall_s")}


_NUMBERS = tuple(f.name for f in fields(TimeRecord) if f.name.endswith("_s"))
_TEXTS = ("line", "host", "role")


def parse(record: Mapping[str, Any]) -> TimeRecord | None:
    """The record of a line; None if malformed. Ranks' files are not trusted: numbers must be finite, and texts short."""
    steps, time = record.get("steps"), record.get("time", 0.0)
    values: dict[str, Any] = {name: record.get(name, 0.0) for name in _NUMBERS}
    texts: dict[str, Any] = {name: record.get(name, "") for name in _TEXTS}
    if not isinstance(steps, list) or len(steps) != 2 or not all(type(s) is int and 0 <= s < 1 << 53 for s in steps):
        return None
    if steps[0] > steps[1] or "wall_s" not in record or not all(_is_duration(v) for v in values.values()):
        return None
    if not all(isinstance(t, str) and len(t) <= _LONGEST_TEXT for t in texts.values()) or not _is_duration(time, most=1e12):
        return None
    return TimeRecord((steps[0], steps[1]), **values, **texts, time=time)


def _is_duration(value: object, most: float = _LONGEST_S) -> bool:
    return type(value) in (int, float) and 0 <= value <= most and math.isfinite(value)  # type: ignore[operator, arg-type]


def ranks_of(run: RunDir) -> list[int]:
    """The ranks with records of this attempt, in order."""
    try:
        ranks = [int(m[1]) for p in run.attempt_path.iterdir() if (m := _NAME.fullmatch(p.name))]
    except OSError:
        return []
    return sorted(ranks)[:_MOST_RANKS]


class TimesReader:
    """Follows the records of an attempt: each call of `read` returns those added since the last call."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._readers: dict[int, LineReader] = {}

    def read(self) -> dict[int, list[TimeRecord]]:
        """New records by rank, without ranks that have none."""
        records: dict[int, list[TimeRecord]] = {}
        for rank in ranks_of(self._run):
            reader = self._readers.get(rank)
            if reader is None:
                reader = self._readers[rank] = LineReader.of_end(self._run.times(rank), _MOST_BYTES)
            if new := [r for line in reader.read() if (r := parse(line)) is not None]:
                records[rank] = new
        return records


def read_times(run: RunDir) -> dict[int, list[TimeRecord]]:
    """All records of the attempt `run.attempt`, by rank; empty if there are none. Never raises."""
    return TimesReader(run).read()


def records_of(run: RunDir, rank: int) -> Iterator[TimeRecord]:
    """The records of one rank, as they are read; empty if its file cannot be read. Never raises."""
    try:
        file = open(open_file(run.times(rank)), "rb")
    except OSError:
        return
    with file, contextlib.suppress(OSError):
        size = os.fstat(file.fileno()).st_size  # without lines that are appended meanwhile
        for line in LineReader.of_end(run.times(rank), _MOST_BYTES).records_of(file, size):
            if (record := parse(line)) is not None:
                yield record
