"""Processes that this one did not start itself: whether they run, whether they are its descendants, and their end."""

from __future__ import annotations

import os

__all__ = ["descends", "kill_children", "runs"]


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def descends(pid: int) -> bool:
    """Whether a process was started by this one, or by one that was; Linux alone tells, and elsewhere it counts as true."""
    if not os.path.exists("/proc/self/stat"):
        return True
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return False
    return False


def kill_children() -> None:
    """What is left of the command; what it started has become ours."""
    import psutil  # type: ignore[import-untyped,unused-ignore]  # here: few need it

    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
