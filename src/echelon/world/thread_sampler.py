"""Sample a thread from another one, 20 times a second at first: its Python frames and its state in the kernel.

This shows what the loop's clock cannot: whether a thread that does not compute waits for other ranks, for a disk, or in the
user's code. DistributedDataParallel and FSDP wait within a model's passes, where no mark can be made.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from echelon.world.clock import Clock, Part, open_proc

__all__ = ["FRAMES", "ThreadSampler"]

Kind = Literal["busy", "queued", "own", "wait", "disk"]

# A thread computes if its processor time grows by _MOVED_S within _MOMENT_S.
_MOMENT_S, _MOVED_S = 0.0002, 0.00003
_DEPTH = 3  # frames of libraries that are searched for a collective
_OTHERS_FD = 3  # the first descriptor after standard input, output and error

# Held while a sampler holds frames of another thread: their variables live on. Who looks for what outlives a pass takes it.
FRAMES = threading.Lock()


class ThreadSampler:
    """Samples the thread of a clock.

    Attributes:
        seen: the number of samples by (the clock's part, the part that the frames show, kind).
        lines: the number of samples in each line of the user's code, without waits in collectives.
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
        """Take one sample; none if the thread has ended."""
        with FRAMES:
            part, frame = self._clock.part, sys._current_frames().get(self._clock.thread)
            if frame is None:
                return
            before = time.clock_gettime(self._cpu)
            at_disk = self._is_at_disk()  # checked first: it may last only a moment
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
        """The part that the frames show, whether they are in a collective, and the innermost line of the user's code."""
        shown, is_wait, depth, line = int(part), False, 0, ""
        for each in _outwards(frame):
            name = each.f_code.co_filename
            kind = self._kinds.get(name)
            if kind is None:
                kind = self._kinds[name] = self._kind_of(name)
            if kind == "loop" and not line:  # the frames further out do not matter
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
        if kind == "autograd":  # the backward pass in C++, in which DDP's reducer waits for buckets
            return self._waits_in_backward and depth == 0 and frame.f_code.co_name == "_engine_run_backward"
        return kind == "distributed" or (kind == "echelon" and depth == 0)

    def _kind_of(self, name: str) -> str:
        path = os.path.realpath(os.path.join(self._folder or os.sep, name))  # the current folder may have changed
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
        """The kernel's letter for the thread: R runs or is ready to, S sleeps, D waits for a disk."""
        return chr((_read(self._stat).rpartition(b") ")[2] or b"S")[0])

    def _is_at_disk(self) -> bool:
        """Whether the thread is in a system call about a file, or waits for a page of one."""
        call = _read(self._syscall).split()
        if len(call) > 1 and call[0] not in _NOT_ABOUT_FILES:
            first = int(call[1], 16)
            if first == _HERE:  # a path
                return True
            with contextlib.suppress(OSError):  # not a descriptor
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


# Calls whose first argument is a small number but not a descriptor, on x86-64 and ARM: wait4, select, pselect6, clock_nanosleep.
_NOT_ABOUT_FILES = {b"61", b"23", b"270", b"230", b"247"} if os.uname().machine == "x86_64" else {b"260", b"72", b"115", b"95"}
_HERE = (1 << 64) - 100  # AT_FDCWD


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _folder() -> str:
    """The working folder at the start, with a slash; empty if it does not exist. A script may change or remove it later."""
    try:
        return os.path.join(os.getcwd(), "")
    except OSError:
        return ""
