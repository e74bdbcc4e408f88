"""A rank's pulse: its progress, in a few bytes of shared memory that its launcher reads once a second.

A rank writes a few numbers into memory, which takes well below a microsecond and never blocks. Without a launcher that shares
such memory, it writes into memory of its own. The launcher's side is `launcher.local.watch`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

__all__ = ["Phase", "RankProgress", "ask_stack", "at", "begin", "during", "join", "leave", "make", "read", "stack"]

_SIZE = 4096  # a page; the rank's stack follows in the file, if it was asked for
_LONGEST_STACK = 1 << 20
_STEP, _PHASE, _EVALUATED, _BEATS = 0, 1, 2, 3


class Phase(IntEnum):
    """A rank's phase in its loop, in the order of a step."""

    NONE = 0  # no echelon loop has begun
    AFTER = 1  # callbacks, after an update
    CHECKPOINT = 2
    EVAL_DATA = 3
    EVAL_STEP = 4
    BETWEEN = 5  # between epochs: the unit's and the callbacks' hooks
    DATA = 6
    STEP = 7
    ENDED = 8  # the loop has ended; the user's code follows


@dataclass(frozen=True)
class RankProgress:
    """A rank's position in its loop.

    Args:
        step: number of completed updates.
        phase: the present phase.
        evaluated: steps of the present evaluation; otherwise micro-batches of the present update.
        beats: number of beats in this epoch.
    """

    step: int = 0
    phase: Phase = Phase.NONE
    evaluated: int = 0
    beats: int = 0

    def __str__(self) -> str:
        return {
            Phase.NONE: "before its first loop",
            Phase.AFTER: f"in callbacks after update {self.step}",
            Phase.CHECKPOINT: f"in a checkpoint after update {self.step}",
            Phase.EVAL_DATA: f"in an evaluation, waiting for the data of its step {self.evaluated + 1}",
            Phase.EVAL_STEP: f"in an evaluation, in its step {self.evaluated + 1}",
            Phase.BETWEEN: f"between epochs, after update {self.step}",
            Phase.DATA: f"waiting for the data of update {self.step + 1}",
            Phase.STEP: f"in update {self.step + 1}",
            Phase.ENDED: f"past its loop, after update {self.step}",
        }[self.phase]

    @property
    def position(self) -> tuple[int, int, int, int, int]:
        """A tuple that is smaller for a rank that is behind."""
        evaluates = self.phase in (Phase.EVAL_DATA, Phase.EVAL_STEP)
        within = self.evaluated if self.phase in (Phase.AFTER, Phase.DATA, Phase.STEP) else 0
        stage = Phase.EVAL_DATA if evaluates else self.phase
        return self.step, within, stage, self.evaluated if evaluates else 0, self.phase


_numbers: memoryview = memoryview(bytearray(_SIZE)).cast("q")
_beats = 0
_write = Struct("4q").pack_into  # writes all at once, in half the time


def at(phase: int, step: int, evaluated: int = 0) -> None:
    """Record this rank's position."""
    global _beats
    _beats += 1
    _write(_numbers, 0, step, phase, evaluated, _beats)


def begin() -> None:
    """Record that an epoch begins: its first steps may take longer than the rest."""
    global _beats
    _beats = _numbers[_BEATS] = 0


def leave() -> None:
    """Record that this rank is past its loop, at any step."""
    _numbers[_PHASE] = Phase.ENDED


@contextlib.contextmanager
def during(phase: int) -> Iterator[None]:
    """In this context the rank is in `phase`, at its present step."""
    before = _numbers[_PHASE]
    _numbers[_PHASE] = phase
    try:
        yield
    finally:
        _numbers[_PHASE] = before


def join(fd: int) -> None:
    """From here on, the process that made the file of this descriptor sees this rank's position."""
    global _numbers, _beats
    _numbers = memoryview(mmap.mmap(fd, _SIZE)).cast("q")
    _beats = 0


def make() -> int:
    """A file in memory for one rank. Never on a disk: a write to a mapped file kills the process when the disk is full."""
    fd = os.memfd_create("echelon-pulse")
    os.write(fd, bytes(_SIZE))
    return fd


def read(fd: int) -> RankProgress:
    numbers = memoryview(os.pread(fd, 32, 0)).cast("q")
    try:
        return RankProgress(numbers[_STEP], Phase(numbers[_PHASE]), numbers[_EVALUATED], numbers[_BEATS])
    except (ValueError, IndexError):  # a rank's process may have written anything there
        return RankProgress()


def ask_stack(fd: int) -> None:
    """Make room for a stack, which the rank writes at the file's position."""
    os.ftruncate(fd, _SIZE)
    os.lseek(fd, _SIZE, os.SEEK_SET)


def stack(fd: int) -> str:
    """The text that the rank has written, at most its end, which has the main thread; empty if the rank did not answer."""
    begin = max(_SIZE, os.fstat(fd).st_size - _LONGEST_STACK)
    return os.pread(fd, _LONGEST_STACK, begin).decode("utf-8", "replace").strip()
