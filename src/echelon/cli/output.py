"""The command's own standard streams: closed from the beginning, gone in the middle, or on a full disk.

A reader that goes away (`echelon jobs | head -1`) ends a command that only shows something, quietly and with the exit code that a
shell gives a program which SIGPIPE ended. What was done stays done: a run continues, a job is submitted.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TextIO

__all__ = ["READER_GONE", "flush_streams", "open_streams", "reader_has_gone"]

READER_GONE = 141  # 128 + SIGPIPE


def open_streams() -> None:
    """Point whichever of the three is closed at nothing: the next file that is opened would else be taken for it."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)


def reader_has_gone() -> bool:
    """Whether standard output or error is a pipe that nobody will read any more."""
    poll = select.poll()
    for fd in (1, 2):
        poll.register(fd, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def flush_streams() -> OSError | None:
    """Flush the buffers; what cannot be written is dropped, instead of failing again at exit.

    Returns:
        Why standard output could not be written.
    """
    why: OSError | None = None
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError as error:
            why = error if fd == 1 else why
            _to_nothing(stream, fd)
        except ValueError:  # closed by the code that replaced it
            pass
    return why


def _to_nothing(stream: TextIO, fd: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
    with contextlib.suppress(OSError):
        stream.flush()
