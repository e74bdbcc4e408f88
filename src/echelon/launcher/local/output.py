"""Where a rank's standard streams go, and what happens when they cannot be written: never the end of the run."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

from echelon.common.files import open_to_append
from echelon.contracts.run_dir import FULL_DISK

__all__ = ["forgive_output", "output_to", "redirect"]


def redirect(log: str | None, output: int | None = None, error: int | None = None) -> None:
    """Point standard input at nothing, output and error at these descriptors, else at the log."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if output is not None and error is not None:
        os.dup2(output, 1)
        os.dup2(error, 2)
        os.close(output)
        os.close(error)
    elif log:
        fd = _open_log(log)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    # New objects: the server's may hold another encoding or buffer. Lines are flushed, so a kill loses none.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    forgive_output()


def forgive_output() -> None:
    """From here on, what cannot be written to standard output and error does not end this process."""
    sys.stdout = sys.__stdout__ = _line_writer(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _line_writer(2)  # type: ignore[misc]


class _Output(io.FileIO):
    """A descriptor to write to whose trouble is not the program's: a full disk costs lines of output, never the run.

    What could not be written is counted, and said where writing continues.
    """

    _lost = 0

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        try:
            if self._lost:
                super().write(f"\n(echelon: {self._lost} bytes of output could not be written here)\n".encode())
                self._lost = 0
            written = super().write(data)
        except OSError:
            self._lost += size
            return size
        return size if written is None else written  # None: a pipe that is full and does not block


def _open_log(path: str | Path) -> int:
    try:
        return open_to_append(path)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        return os.open(os.devnull, os.O_WRONLY)


def output_to(log: Path) -> io.TextIOWrapper:
    """The log of this process's rank, to write to."""
    return _line_writer(_open_log(log), closes=True)


def _line_writer(fd: int, *, closes: bool = False) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Output(fd, "w", closefd=closes))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
