"""Detects kills by the kernel's OOM killer, by its counters before and after."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

__all__ = ["OomCount", "gib"]

_UNLIMITED = 1 << 60  # version 1 of control groups writes "no limit" as pages, just below 2**63


class OomCount:
    """Number of processes that the OOM killer has killed since this object was made.

    Counts in the control groups of this process, which its ranks share; if none can be read, on the whole machine.

    Args:
        groups, own, machine: paths where Linux describes control groups, those of this process, and the machine.
    """

    def __init__(
        self,
        groups: Path = Path("/sys/fs/cgroup"),
        own: Path = Path("/proc/self/cgroup"),
        machine: Path = Path("/proc/vmstat"),
    ) -> None:
        self._files, self._limits = [], []
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = own.read_text().splitlines()
        for line in lines:
            _, kinds, path = [*line.split(":", 2), "", ""][:3]
            if kinds and "memory" not in kinds.split(","):
                continue
            # In a container the path may be the machine's, of which only the root is visible.
            inner, root = Path(path.lstrip("/")), groups / "memory" if kinds else groups
            name, limit = ("memory.oom_control", "memory.limit_in_bytes") if kinds else ("memory.events", "memory.max")
            folders = [root / folder for folder in (inner, *inner.parents) if ".." not in folder.parts]
            self._limits += [folder / limit for folder in folders]
            self._files += [folder / name for folder in folders if _count(folder / name) is not None][:1]
        self._files = self._files or [machine]
        self._before = self._now()

    @property
    def known(self) -> bool:
        return self._before is not None

    def since(self) -> int:
        now = self._now()
        return max(0, now - self._before) if now is not None and self._before is not None else 0

    def limit_bytes(self) -> int | None:
        """The smallest limit of the groups; None if there is no limit."""
        limits = []
        for file in self._limits:
            with contextlib.suppress(OSError, ValueError):
                limits.append(int(file.read_text()))
        return min((limit for limit in limits if limit < _UNLIMITED), default=None)

    def _now(self) -> int | None:
        counts = [count for file in self._files if (count := _count(file)) is not None]
        return sum(counts) if counts else None


def _count(file: Path) -> int | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if match := re.search(r"^oom_kill (\d{1,15})$", file.read_text(), re.MULTILINE):
            return int(match[1])
    return None


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
