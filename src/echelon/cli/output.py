"""The command's own standard streams, which may be closed at the start, lose their reader, or lie on a full disk.

If the reader goes away (`echelon jobs | head -1`), a command that only shows something ends quietly, with the exit code that a
shell gives for SIGPIPE. A command that acts keeps its effect: the run continues, the job is submitted.
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
    """Open closed standard streams on /dev/null: otherwise the next opened file would get their descriptor."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)


def reader_has_gone() -> bool:
    """Whether standard output or error is a pipe without a reader."""
    poll = select.poll()
    for fd in (1, 2):
        poll.register(fd, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def flush_streams() -> OSError | None:
    """Flush standard output and error. Output that cannot be written is dropped, so that it does not fail again at exit.

    Returns:
        The error of standard output, if it could not be written.
    """
    why: OSError | None = None
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError as error:
            why = error if fd == 1 else why
            _to_nothing(stream, fd)
        except ValueError:  # closed by code that replaced the stream
            pass
    return why


def _to_nothing(stream: TextIO, fd: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
    with contextlib.suppress(OSError):
        stream.flush()
