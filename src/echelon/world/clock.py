"""The clock of this rank's loop. Marks separate the parts of a step; wall and processor time are summed for each part.

A mark costs a quarter of a microsecond, and next to nothing if no clock runs. `loop/reporting/times.py` writes the times down.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter, thread_time

from echelon.contracts import pulse

__all__ = ["Clock", "Group", "Part", "during", "enter", "in_checkpoint", "start", "stop"]


class Part(IntEnum):
    """The part of a step that the loop is in."""

    OTHER = 0  # hooks, callbacks, a loop's own code between its steps
    DATA = 1
    STEP = 2  # the user's code: forward, backward and optimizer
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    WAIT = 6  # waiting for a message of the loop itself
    CHECKPOINT = 7
    EVAL = 8


_PARTS = len(Part)
OTHER, EVAL = int(Part.OTHER), int(Part.EVAL)  # a look-up in the enumeration takes as long as a mark
_BRIEF_S = 0.0002  # a shorter part counts as computed: a call of the kernel costs more than everything else here
_GROUP_S = 0.03  # shorter steps are noted in groups: a note costs as much as twenty marks
# More groups than come between two records, unless nothing takes them: the disk hangs, or the writing thread has ended.
_MOST_GROUPS = 4096


@dataclass(frozen=True)
class Group:
    """Totals at the end of a step.

    Args:
        step: training steps completed.
        at: `perf_counter`.
        wall, used: seconds in each part so far, and the thread's processor time in it.
        queued: seconds so far in which the thread was ready to run but others had the cores.
    """

    step: int
    at: float
    wall: tuple[float, ...]
    used: tuple[float, ...]
    queued: float


class Clock:
    """Sums the time of the thread that creates it.

    Attributes:
        part: the current part.
        thread, native: the thread's number in Python and in the kernel.
        groups: totals since they were last taken, the newest last. If they are not taken, older ones are thinned out.
    """

    __slots__ = ("_idle", "_lag", "_queue", "_since", "_wall", "groups", "native", "noted_at", "part", "step", "thread")

    def __init__(self, step: int) -> None:
        self.thread, self.native = threading.get_ident(), threading.get_native_id()
        self.part, self.step = int(Part.OTHER), step
        self._wall, self._idle = [0.0] * _PARTS, [0.0] * _PARTS
        self._since = self.noted_at = perf_counter()
        self._lag = self._since - thread_time()  # grows while the thread does not compute
        self._queue = open_proc(f"/proc/self/task/{self.native}/schedstat")
        self.groups: list[Group] = []
        self.note()

    def enter(self, part: int) -> int:
        now, before = perf_counter(), self.part
        elapsed = now - self._since
        self._wall[before] += elapsed
        if elapsed > _BRIEF_S:
            lag = now - thread_time()
            self._idle[before] += lag - self._lag
            self._lag = lag
        self._since, self.part = now, part
        return before

    def step_ended(self, step: int) -> None:
        """Note that `step` training steps are complete; OTHER begins. Steps of an evaluation are ignored."""
        if self.part == EVAL:
            return
        self.enter(OTHER)
        self.step = step
        if self._since - self.noted_at >= _GROUP_S:
            self.note()

    def note(self) -> None:
        """Append the current totals to `groups`."""
        self.enter(self.part)
        self.noted_at = self._since
        queued = 0.0
        if self._queue is not None:
            try:
                queued = int(os.pread(self._queue, 64, 0).split()[1]) * 1e-9
            except (OSError, ValueError, IndexError):  # a kernel without these statistics
                queued = 0.0
        if len(self.groups) >= _MOST_GROUPS:
            del self.groups[1:-1:2]  # these are totals: the remaining ones cover the same time in larger pieces
        used = tuple(wall - idle for wall, idle in zip(self._wall, self._idle, strict=True))
        self.groups.append(Group(self.step, self._since, tuple(self._wall), used, queued))

    def close(self) -> None:
        if self._queue is not None:
            os.close(self._queue)
            self._queue = None


def open_proc(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


# The clock of the recorded loop, if there is one. Code that makes marks in every step reads it here.
running: Clock | None = None


def start(step: int) -> Clock | None:
    """Start a clock in this thread; None if one runs already, of an outer loop or another thread."""
    global running
    if running is not None:
        return None
    running = Clock(step)
    return running


def stop() -> None:
    global running
    ended, running = running, None
    if ended is not None:
        ended.close()


def enter(part: int) -> int:
    """Mark that the loop enters `part`; returns the part before."""
    return part if running is None else running.enter(part)


@contextlib.contextmanager
def during(part: int) -> Iterator[None]:
    """Context of a part; afterwards the loop is in the previous one."""
    before = enter(part)
    try:
        yield
    finally:
        enter(before)


@contextlib.contextmanager
def in_checkpoint() -> Iterator[None]:
    """Context in which the loop saves or reads a checkpoint; the launcher sees this as well."""
    with pulse.during(pulse.Phase.CHECKPOINT), during(Part.CHECKPOINT):
        yield
