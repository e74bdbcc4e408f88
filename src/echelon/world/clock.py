"""The clock of this rank's loop: marks around the parts of its steps, between which wall and processor time are added up.

A mark costs a quarter of a microsecond, and next to nothing where nobody writes the times down. `loop/reporting/times.py` does.
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
    """What the loop is at."""

    OTHER = 0  # hooks, callbacks, a loop's own code between its steps
    DATA = 1
    STEP = 2  # code of the user's own: forward, backward and optimizer
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    WAIT = 6  # for a message of the loop's own
    CHECKPOINT = 7
    EVAL = 8


_PARTS = len(Part)
OTHER, EVAL = int(Part.OTHER), int(Part.EVAL)  # asking the enumeration takes as long as making a mark
_BRIEF_S = 0.0002  # a part that is over so soon counts as computed: asking the kernel costs more than all else here
_GROUP_S = 0.03  # steps are noted one by one if they take longer, else so many at once: a note costs as much as twenty marks
# More than come between two records, unless nobody takes them: the disk hangs, or the thread beside the loop has ended.
_MOST_GROUPS = 4096


@dataclass(frozen=True)
class Group:
    """Totals at the end of a step.

    Args:
        step: training steps completed.
        at: `perf_counter`.
        wall, used: seconds in each part so far, and the thread's processor time in it.
        queued: seconds so far for which the thread could have run, and others had the cores.
    """

    step: int
    at: float
    wall: tuple[float, ...]
    used: tuple[float, ...]
    queued: float


class Clock:
    """Adds up the time of the thread that makes it.

    Attributes:
        part: which it is in.
        thread, native: that thread, as Python and as the kernel number it.
        groups: totals since they were last taken; the newest is last. Where they are not taken, ever fewer of the older ones.
    """

    __slots__ = ("_idle", "_lag", "_queue", "_since", "_wall", "groups", "native", "noted_at", "part", "step", "thread")

    def __init__(self, step: int) -> None:
        self.thread, self.native = threading.get_ident(), threading.get_native_id()
        self.part, self.step = int(Part.OTHER), step
        self._wall, self._idle = [0.0] * _PARTS, [0.0] * _PARTS
        self._since = self.noted_at = perf_counter()
        self._lag = self._since - thread_time()  # which grows by what the thread does not compute
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
        """So many are complete; what follows is OTHER. One of an evaluation is part of that."""
        if self.part == EVAL:
            return
        self.enter(OTHER)
        self.step = step
        if self._since - self.noted_at >= _GROUP_S:
            self.note()

    def note(self) -> None:
        """Keep the totals as they are now."""
        self.enter(self.part)
        self.noted_at = self._since
        queued = 0.0
        if self._queue is not None:
            try:
                queued = int(os.pread(self._queue, 64, 0).split()[1]) * 1e-9
            except (OSError, ValueError, IndexError):  # a kernel that counts nothing
                queued = 0.0
        if len(self.groups) >= _MOST_GROUPS:
            del self.groups[1:-1:2]  # totals: those that stay say all of the time, in larger pieces
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


# Of the loop that is written down, if there is one. What makes a mark in every step asks for it here.
running: Clock | None = None


def start(step: int) -> Clock | None:
    """Begin to add up, in this thread; None if a loop around this one does, or a thread beside it."""
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
    """From now on the loop is in `part`; returns the one it was in."""
    return part if running is None else running.enter(part)


@contextlib.contextmanager
def during(part: int) -> Iterator[None]:
    """Context of a part, after which the loop is in the one before."""
    before = enter(part)
    try:
        yield
    finally:
        enter(before)


@contextlib.contextmanager
def in_checkpoint() -> Iterator[None]:
    """Context in which the loop stops for a checkpoint, also for the launcher."""
    with pulse.during(pulse.Phase.CHECKPOINT), during(Part.CHECKPOINT):
        yield
