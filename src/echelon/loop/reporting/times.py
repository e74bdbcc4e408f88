"""Writes every few seconds where this rank's time goes: `contracts/times.py` has the format, `clock.py` the marks.

The loop's thread only adds up times. A second thread samples the loop's thread, makes the records and writes them, so that a slow
or full disk does not delay the loop.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from echelon.contracts.events import EventLog
from echelon.contracts.run_dir import RunDir
from echelon.contracts.times import TimeRecord
from echelon.world import clock
from echelon.world.clock import Clock, Group, Part
from echelon.world.thread_sampler import Kind, ThreadSampler

__all__ = ["Garbage", "noted", "record_of"]

logger = logging.getLogger(__name__)

# Samples per record, at varying intervals: equal intervals would always hit a step of that length at the same place. A sample
# delays the loop by as much as a step of a small model, so a long run, whose records span more steps, takes them less often.
_LOOKS = 40
_FADES = 0.5  # weight of earlier records' samples, for parts that have few
# The first record covers the first steps, which compile and connect ranks. Then a record comes at intervals, which grow with the
# run.
_WARM_STEPS, _LEAST_S, _MOST_S, _OF_RUN = 2, 2.0, 15.0, 0.02
# A young run writes a record after this many steps already, so that a slow rank is known within twenty steps.
_EARLY_STEPS, _EARLY_S, _IS_YOUNG = 5, 0.12, 30

_GROUPS = 64  # stretches of a record, at most, whose median is the usual step

Seen = Mapping[tuple[int, int, Kind], float]


@contextlib.contextmanager
def noted(rank: int, ranks: int, step: int, role: str = "") -> Iterator[None]:
    """Context of a loop whose times are written to the run's folder, if there is one.

    Args:
        step: training steps completed before it.
        role: see TimeRecord.
    """
    run = RunDir.current()
    running = clock.start(step) if run is not None else None
    if run is None or running is None:
        yield
        return
    try:
        writer = _Writer(running, EventLog(run.times(rank)), ranks, role)
    except OSError as error:
        logger.warning("%s cannot be written: %s. The report will not show where time goes.", run.times(rank), error.strerror)
        clock.stop()
        yield
        return
    try:
        yield
    finally:
        running.note()
        clock.stop()
        writer.close()


class _Writer(threading.Thread):
    """Thread that samples and writes beside the loop, until the loop ends."""

    def __init__(self, running: Clock, log: EventLog, ranks: int, role: str) -> None:
        super().__init__(name="echelon-times", daemon=True)
        self._clock, self._log, self._role, self._host = running, log, role, socket.gethostname()[:300]
        # On a GPU the loop's thread sleeps in the backward pass while an autograd thread works.
        self._where = ThreadSampler(running, waits_in_backward=ranks > 1 and not torch.cuda.is_initialized())
        self._alone = ranks == 1
        self._seen: dict[tuple[int, int, Kind], float] = {}
        self._ended, self._began = threading.Event(), time.perf_counter()
        self._last, self._first_step = running.groups[0], running.step
        self._garbage = Garbage(running.thread)
        self._wall_offset = time.time() - self._began
        self._startup_s = _age_s() if log.path.stat().st_size == 0 else 0.0
        self.start()

    def run(self) -> None:
        chance = random.Random()
        while not self._ended.wait(self._record_s() / _LOOKS * chance.uniform(0.4, 1.6)):
            try:
                self._where.look()
                if self._is_due(self._clock.groups[-1]):
                    self._write()
            except Exception:  # watching a run must never end it
                logger.warning("the record of where time goes ends here, because of an error", exc_info=True)
                return

    def _is_due(self, newest: Group) -> bool:
        steps, seconds = newest.step - self._last.step, newest.at - self._last.at
        if self._last.step == self._first_step:
            return steps >= _WARM_STEPS
        young = newest.step - self._first_step <= _IS_YOUNG
        if young and steps >= _EARLY_STEPS and seconds >= _EARLY_S:
            return True
        return seconds >= self._record_s()

    def _record_s(self) -> float:
        """Length of a record in seconds, after the first record."""
        return min(_MOST_S, max(_LEAST_S, _OF_RUN * (time.perf_counter() - self._began)))

    def _write(self) -> None:
        groups, self._clock.groups = self._clock.groups, self._clock.groups[-1:]
        # A group that the loop adds meanwhile is in this record's `groups`; the next record has it in its totals only.
        seen, self._where.seen = self._where.seen, Counter()
        self._seen = {at: seen[at] + _FADES * self._seen.get(at, 0.0) for at in {*seen, *self._seen}}
        lines, self._where.lines = self._where.lines, Counter()
        record = record_of([self._last, *groups], self._seen, alone=self._alone)
        self._last = groups[-1]
        about = {
            "gc_s": self._garbage.take(self._last.at),
            "startup_s": self._startup_s,
            "line": lines.most_common(1)[0][0][-300:] if lines else "",
            "host": self._host,
            "role": self._role,
            "time": groups[-1].at + self._wall_offset,
        }
        self._startup_s = 0.0
        self._log.write([TimeRecord(**{**record, **about}).to_json()])

    def close(self) -> None:
        """Write the rest. Does not wait for a disk that hangs: the thread may, and ends with the process."""
        self._ended.set()
        self._garbage.close()
        self.join(10.0)
        if not self.is_alive():
            with contextlib.suppress(Exception):
                self._write()
            self._where.close()
            self._log.close()


def _age_s() -> float:
    """Seconds since this process started; 0 if unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError):  # not Linux
        return 0.0


class Garbage:
    """Measures how long Python's garbage collector delays a thread."""

    def __init__(self, thread: int) -> None:
        self._thread, self._since = thread, 0.0
        self._collections: list[tuple[float, float]] = []  # (when it ended, seconds)
        gc.callbacks.append(self._tell)

    def _tell(self, phase: str, info: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._since = time.perf_counter()
        elif self._since:
            now = time.perf_counter()
            self._collections.append((now, now - self._since))

    def take(self, until: float) -> float:
        """Seconds of the collections since the last call that had ended by `until`; the next call has the others."""
        collections, self._collections = self._collections, []
        self._collections += [each for each in collections if each[0] > until]
        return sum(seconds for ended, seconds in collections if ended <= until)

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._tell)


# --- the fields of a record, from the clock's totals and the samples

_BY_PART = {Part.DATA: "data_s", Part.OTHER: "other_s", Part.OPTIMIZER: "optimizer_s"}
_BY_PART |= {Part.FORWARD: "forward_s", Part.BACKWARD: "backward_s", Part.STEP: "forward_s"}
_WITHOUT = (Part.WAIT, Part.CHECKPOINT, Part.EVAL)


def record_of(groups: Sequence[Group], seen: Seen, *, alone: bool) -> dict[str, Any]:
    """The fields of a record that come from the clock, for the time from the first group to the last.

    Within a part, the time in which the thread did not compute is exact. The samples tell how much of it was a wait for other
    ranks.

    Args:
        seen: samples; see ThreadSampler.
        alone: there are no other ranks. Otherwise, idle time of a part without samples counts as a wait for other ranks, except
            while fetching data, so that no rank is blamed without evidence.
    """
    first, last = groups[0], groups[-1]
    waits = {part: _share(seen, part, "wait", 0.0 if alone or part == Part.DATA else 1.0) for part in _BY_PART}
    fields = dict.fromkeys(("data_s", "forward_s", "backward_s", "optimizer_s", "other_s", "disk_s"), 0.0)
    spent = _Spent.between(first, last)
    fields["wait_s"] = spent.wall[Part.WAIT]
    for part, name in _BY_PART.items():
        waited = spent.idle(part) * waits[part]
        fields["wait_s"] += waited
        fields["disk_s"] += spent.idle(part) * _share(seen, part, "disk", 0.0)
        for shown, share in _shown(seen, part).items():
            fields[_BY_PART.get(Part(shown), name)] += (spent.wall[part] - waited) * share
    own = []
    for before, after in pairwise(groups[:: 1 + len(groups) // _GROUPS]):
        if after.step > before.step:
            each = _Spent.between(before, after)
            own.append(each.own(waits) / (after.step - before.step))
    return {
        "steps": (min(first.step, last.step), last.step),  # a rollback goes back to older ones
        "wall_s": last.at - first.at,
        **fields,
        "checkpoint_s": spent.wall[Part.CHECKPOINT],
        "eval_s": spent.wall[Part.EVAL],
        "queue_s": spent.queued,
        "own_s": median(own) if own else 0.0,
    }


class _Spent:
    """Seconds between two groups, by part."""

    def __init__(self, wall: Sequence[float], used: Sequence[float], queued: float) -> None:
        self.wall, self.used = wall, used
        # Waits for a core are spread over the parts in which the thread computes.
        self.queued = min(queued, sum(max(0.0, w - u) for w, u in zip(wall, used, strict=True)))
        self._queued_each = self.queued / (sum(used) or 1.0)

    @classmethod
    def between(cls, first: Group, last: Group) -> _Spent:
        wall = [max(0.0, b - a) for a, b in zip(first.wall, last.wall, strict=True)]
        used = [max(0.0, b - a) for a, b in zip(first.used, last.used, strict=True)]
        return cls(wall, used, max(0.0, last.queued - first.queued))

    def queue(self, part: int) -> float:
        return min(self._queued_each * self.used[part], max(0.0, self.wall[part] - self.used[part]))

    def idle(self, part: int) -> float:
        """Seconds in which the thread slept in a part."""
        return max(0.0, self.wall[part] - self.used[part] - self.queue(part))

    def own(self, waits: Mapping[Part, float]) -> float:
        """Seconds without waits for other ranks or for a core."""
        return sum(self.wall[p] - self.queue(p) - self.idle(p) * share for p, share in waits.items())


def _share(seen: Seen, part: int, kind: Kind, unknown: float) -> float:
    """Share of a kind in the samples that found the thread asleep in a part."""
    asleep = {k: sum(n for (p, _, what), n in seen.items() if p == part and what == k) for k in ("own", "wait", "disk")}
    total = sum(asleep.values())
    return asleep[kind] / total if total else unknown


def _shown(seen: Seen, part: int) -> dict[int, float]:
    """The parts that stack frames showed while the clock was at `part`, without waits; each with its share of the samples."""
    seconds: dict[int, float] = {}
    for (at, shown, kind), n in seen.items():
        if at == part and kind != "wait":
            seconds[shown] = seconds.get(shown, 0.0) + n
    total = sum(seconds.values())
    return {shown: n / total for shown, n in seconds.items()} if total else {int(part): 1.0}
