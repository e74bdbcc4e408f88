"""Slurm's short forms: "node[01-03,07],login" for names, "2(x3),1" for counts. No `scontrol`: a container often lacks it."""

from __future__ import annotations

import re

from echelon.contracts.errors import LauncherEnvironmentError

__all__ = ["expand_hostlist", "tasks_on_node"]


def expand_hostlist(text: str) -> list[str]:
    """Slurm's "node[01-03,07],login" as names, in order.

    Raises:
        LauncherEnvironmentError: the brackets do not match, or hold no ranges.
    """
    hosts: list[str] = []
    for item in re.split(r",(?![^\[\]]*\])", text):  # commas outside of brackets
        parts = re.split(r"\[([^\[\]]*)\]", item.strip())
        names = [""]
        for i, part in enumerate(parts):
            if i % 2 == 0 and re.search(r"[\[\],]", part):
                raise LauncherEnvironmentError(f"cannot read the node list {text!r}: brackets do not match.")
            choices = [part] if i % 2 == 0 else _expand_ranges(part, text)
            names = [name + choice for name in names for choice in choices]
        hosts += [name for name in names if name]
    return hosts


def _expand_ranges(ranges: str, whole: str) -> list[str]:
    out: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or high < low or high - low > 1_000_000:
            raise LauncherEnvironmentError(f"cannot read {part!r} in the node list {whole!r}.")
        out += [str(n).zfill(len(match[1])) for n in range(low, high + 1)]
    return out


def tasks_on_node(per_node: str, node_rank: int) -> int | None:
    """Slurm's "2(x3),1" means 2,2,2,1. Source: sbatch(1), SLURM_TASKS_PER_NODE."""
    counts: list[int] = []
    for part in per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node_rank] if 0 <= node_rank < len(counts) else None
