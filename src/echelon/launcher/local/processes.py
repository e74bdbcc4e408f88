"""Processes that this one did not start itself: whether they run, whether they are its descendants, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from echelon.common.machine import process_stat

__all__ = ["descends", "kill_children", "runs", "signal_if"]


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return process_stat(pid)[:1] not in ([], ["Z"], ["X"])


def descends(pid: int) -> bool:
    """Whether a process was started by this one, or by one that was; Linux alone tells, and elsewhere it counts as true."""
    if not os.path.exists("/proc/self/stat"):
        return True
    while pid > 1 and pid != os.getpid():
        fields = process_stat(pid)
        pid = int(fields[1]) if fields else 0
    return pid == os.getpid()


def signal_if(pid: int, number: int, is_meant: Callable[[int], bool]) -> None:
    """Send a signal to a process that is looked at first, and held before that: no other is given its number meanwhile.

    Args:
        is_meant: whether the process that has the number now is the one that is meant.
    """
    try:
        held = os.pidfd_open(pid)
    except (OSError, AttributeError):  # it has ended; there are no such handles
        return
    try:
        if is_meant(pid):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(held, number)
    finally:
        os.close(held)


def kill_children() -> None:
    """All that this process has started, and what these have; of a subreaper also what is left of those that have ended."""
    import psutil  # type: ignore[import-untyped,unused-ignore]  # here: few need it

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
