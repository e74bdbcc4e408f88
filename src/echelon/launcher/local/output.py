"""A rank's standard streams. Output that cannot be written never ends the run."""

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
    """Connect standard input to /dev/null; output and error to these descriptors, or else to the log."""
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
    # New objects: those of the server may have another encoding or buffered text. Line buffering: a kill loses no whole line.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    forgive_output()


def forgive_output() -> None:
    """From here on, a failed write to standard output or error does not end this process."""
    sys.stdout = sys.__stdout__ = _line_writer(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _line_writer(2)  # type: ignore[misc]


class _Output(io.FileIO):
    """A descriptor whose write errors are ignored: a full disk loses lines of output, but never ends the run.

    Lost bytes are counted, and reported when writing works again.
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
        return size if written is None else written  # None: a full pipe that does not block


def _open_log(path: str | Path) -> int:
    try:
        return open_to_append(path)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        return os.open(os.devnull, os.O_WRONLY)


def output_to(log: Path) -> io.TextIOWrapper:
    """A text stream to the log of this process's rank."""
    return _line_writer(_open_log(log), closes=True)


def _line_writer(fd: int, *, closes: bool = False) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Output(fd, "w", closefd=closes))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
