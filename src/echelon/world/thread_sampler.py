"""Where a thread is: looked at from another one, 20 times a second at first, with its Python frames and its state in the kernel.

What the clock of the loop cannot tell: whether a thread that does not compute waits for other ranks, for a disk, or in a line of
the user's own. DistributedDataParallel and FSDP wait within the passes of a model, where no mark can be made.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from echelon.world.clock import Clock, Part, open_proc

__all__ = ["ThreadSampler"]

Kind = Literal["busy", "queued", "own", "wait", "disk"]

# A thread that computes moves on meanwhile; one that waits does not.
_MOMENT_S, _MOVED_S = 0.0002, 0.00003
_DEPTH = 3  # frames of a library that are looked at for a collective
_PYTHON, _TORCH = "python", "torch"
_OTHERS_FD = 3  # the first that is not standard input or output


class ThreadSampler:
    """Looks at the thread of a clock.

    Attributes:
        seen: how often it was at what: (the clock's part, the part that the frames show, what it did).
        lines: of the user's code, how often it was there by itself.
    """

    def __init__(self, clock: Clock, *, waits_in_backward: bool) -> None:
        self._clock, self._waits_in_backward = clock, waits_in_backward
        self.seen: Counter[tuple[int, int, Kind]] = Counter()
        self.lines: Counter[str] = Counter()
        self._kinds: dict[str, str] = {}
        self._folder = _folder()
        self._stat, self._syscall = (open_proc(f"/proc/self/task/{clock.native}/{name}") for name in ("stat", "syscall"))
        self._cpu = time.pthread_getcpuclockid(clock.thread)
        folder_of = os.path.dirname
        self._echelon = str(Path(__file__).resolve().parents[1]) + os.sep
        self._torch = folder_of(os.path.realpath(torch.__file__)) + os.sep
        libraries = {os.path.realpath(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
        self._libraries = tuple(f"{each}{os.sep}" for each in libraries | {folder_of(os.path.realpath(os.__file__))})

    def look(self) -> None:
        """Once. Where the thread has ended, nothing is seen."""
        part, frame = self._clock.part, sys._current_frames().get(self._clock.thread)
        if frame is None:
            return
        before = time.clock_gettime(self._cpu)
        at_disk = self._is_at_disk()  # first: it may be there for a moment only
        shown, is_wait, line = self._read(frame, part)
        del frame
        kind: Kind
        if at_disk and not is_wait:
            kind = "disk"
        else:
            time.sleep(_MOMENT_S)
            moved = time.clock_gettime(self._cpu) - before > _MOVED_S
            kind = "busy" if moved else "queued" if self._state() == "R" else "wait" if is_wait else "own"
        if self._clock.part != part:
            return
        self.seen[part, shown, kind] += 1
        if line and not (is_wait and kind != "busy"):
            self.lines[line] += 1

    def _read(self, frame: FrameType, part: int) -> tuple[int, bool, str]:
        """The part that the frames show; whether they are in a collective; and the innermost line of the user's."""
        shown, is_wait, depth, line = int(part), False, 0, ""
        for each in _outwards(frame):
            name = each.f_code.co_filename
            kind = self._kinds.get(name)
            if kind is None:
                kind = self._kinds[name] = self._kind_of(name)
            if kind == "loop" and not line:  # what called it says nothing
                break
            if not line and kind == "user":
                line = f"{name.removeprefix(self._folder)}:{each.f_lineno} in {each.f_code.co_name}"
            if not line and depth < _DEPTH:
                is_wait = is_wait or self._waits(kind, each, depth)
                depth += 1
            if part == Part.STEP and kind in ("autograd", "optimizer"):
                shown = int(Part.BACKWARD if kind == "autograd" else Part.OPTIMIZER)
                break
        if part == Part.STEP and shown == Part.STEP:
            shown = int(Part.FORWARD)
        return shown, is_wait, line

    def _waits(self, kind: str, frame: FrameType, depth: int) -> bool:
        if kind == "autograd":  # in C: where a reducer waits for the buckets of all ranks
            return self._waits_in_backward and depth == 0 and frame.f_code.co_name == "_engine_run_backward"
        return kind == "distributed" or (kind == "echelon" and depth == 0)

    def _kind_of(self, name: str) -> str:
        path = os.path.realpath(os.path.join(self._folder or os.sep, name))  # a relative one, by itself, asks where we are now
        if path.startswith(self._torch):
            rest = path[len(self._torch) :]
            if rest.startswith(("distributed/", "nn/parallel/")):
                return "distributed"
            if rest.startswith("optim/"):
                return "optimizer"
            return "autograd" if rest == "autograd/graph.py" else "library"
        if path.startswith(self._echelon):
            if path == f"{self._echelon}loop{os.sep}steps.py":
                return "loop"
            return "library" if path.startswith((f"{self._echelon}data", f"{self._echelon}checkpoint")) else "echelon"
        is_library = name.startswith("<") or "torchinductor_" in path or path.startswith(self._libraries)
        return "library" if is_library else "user"

    def _state(self) -> str:
        """The kernel's letter for it: R runs or could, S sleeps, D waits for a disk."""
        return chr((_read(self._stat).rpartition(b") ")[2] or b"S")[0])

    def _is_at_disk(self) -> bool:
        """Whether it waits in a call of the kernel about a file, or for a page of one."""
        call = _read(self._syscall).split()
        if len(call) > 1 and call[0] not in _NOT_ABOUT_FILES:
            first = int(call[1], 16)
            if first == _HERE:  # a path
                return True
            with contextlib.suppress(OSError):  # no descriptor
                if _OTHERS_FD <= first < 1 << 20 and stat.S_ISREG(os.fstat(first).st_mode):
                    return True
        return self._state() == "D"

    def close(self) -> None:
        for each in (self._stat, self._syscall):
            if each is not None:
                os.close(each)


def _read(file: int | None) -> bytes:
    try:
        return b"" if file is None else os.pread(file, 512, 0)
    except OSError:  # the thread has ended
        return b""


# Calls whose first argument is a small number and no file's: of x86-64 and of ARM wait4, select, pselect6, clock_nanosleep.
_NOT_ABOUT_FILES = {b"61", b"23", b"270", b"230", b"247"} if os.uname().machine == "x86_64" else {b"260", b"72", b"115", b"95"}
_HERE = (1 << 64) - 100  # AT_FDCWD


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _folder() -> str:
    """The working folder with a slash, as it is at first: a script may leave it, and remove the one that it is in."""
    try:
        return os.path.join(os.getcwd(), "")
    except OSError:
        return ""
