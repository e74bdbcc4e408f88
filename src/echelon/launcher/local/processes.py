"""Processes that this one did not start itself: whether they run, whether they are its descendants, and their end."""

from __future__ import annotations

import contextlib
import os

from echelon.common.machine import process_stat

__all__ = ["descends", "kill_children", "runs"]


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


def kill_children() -> None:
    """All that this process has started, and what these have; of a subreaper also what is left of those that have ended."""
    import psutil  # type: ignore[import-untyped,unused-ignore]  # here: few need it

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
