"""Processes that this one did not start itself: whether they run, whether they are its descendants, and ending them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from echelon.common.machine import process_stat

__all__ = ["descends", "kill_children", "runs", "signal_if"]


def runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    return process_stat(pid)[:1] not in ([], ["Z"], ["X"])


def descends(pid: int) -> bool:
    """Whether a process is a descendant of this one. Only Linux tells; elsewhere the answer is True."""
    if not os.path.exists("/proc/self/stat"):
        return True
    while pid > 1 and pid != os.getpid():
        fields = process_stat(pid)
        pid = int(fields[1]) if fields else 0
    return pid == os.getpid()


def signal_if(pid: int, number: int, is_meant: Callable[[int], bool]) -> None:
    """Send a signal to a process after a check. A handle is opened before, so the number cannot pass to another process
    meanwhile.

    Args:
        is_meant: whether the process that now has the number is the intended one.
    """
    try:
        held = os.pidfd_open(pid)
    except (OSError, AttributeError):  # the process has ended, or the system has no such handles
        return
    try:
        if is_meant(pid):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(held, number)
    finally:
        os.close(held)


def kill_children() -> None:
    """Kill all descendants of this process; of a subreaper also the orphans it adopted."""
    import psutil  # type: ignore[import-untyped,unused-ignore]  # here: few runs need it

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
