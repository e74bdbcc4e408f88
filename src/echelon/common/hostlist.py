"""Slurm's short forms: "node[01-03,07],login" for names, "2(x3),1" for counts. No `scontrol`: a container often lacks it."""

from __future__ import annotations

import re

from echelon.common.errors import LauncherEnvironmentError
from echelon.common.terminal import shortly

__all__ = ["expand_hostlist", "tasks_on_node"]

_MOST = 1_000_000


def expand_hostlist(text: str, what: str = "the node list") -> list[str]:
    """Slurm's "node[01-03,07],login" as names, in order.

    Args:
        what: name of the variable, for the error.
    Raises:
        LauncherEnvironmentError: the brackets do not match, or hold something other than ranges.
    """
    hosts: list[str] = []
    for item in re.split(r",(?![^\[\]]*\])", text):  # split at commas outside of brackets
        parts = re.split(r"\[([^\[\]]*)\]", item.strip())
        names = [""]
        for i, part in enumerate(parts):
            if i % 2 == 0 and re.search(r"[\[\],]", part):
                raise LauncherEnvironmentError(f"cannot read {what} {shortly(text)}: brackets do not match.")
            choices = [part] if i % 2 == 0 else _expand_ranges(part, f"{what} {shortly(text)}")
            if len(names) * len(choices) > _MOST:
                raise LauncherEnvironmentError(f"{what} {shortly(text)} must name at most {_MOST} nodes.")
            names = [name + choice for name in names for choice in choices]
        hosts += [name for name in names if name]
    return hosts


def _expand_ranges(ranges: str, whole: str) -> list[str]:
    out: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or high < low or high - low >= _MOST:
            raise LauncherEnvironmentError(f"cannot read {shortly(part)} in {whole}.")
        out += [str(n).zfill(len(match[1])) for n in range(low, high + 1)]
    return out


def tasks_on_node(per_node: str, node_rank: int) -> int | None:
    """Slurm's "2(x3),1" means 2,2,2,1. Source: sbatch(1), SLURM_TASKS_PER_NODE."""
    before = 0
    for part in per_node.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        if match is None:
            return None
        before += int(match[2] or 1)
        if 0 <= node_rank < before:
            return int(match[1])
    return None
