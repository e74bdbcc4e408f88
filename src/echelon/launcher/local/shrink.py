"""The number of ranks of the next attempt after some were lost: as many as can divide the run's global batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.contracts.restart_notes import read_loaders
from echelon.diagnosis.failure import Failure

__all__ = ["Plan", "loaders_of", "next_ranks"]


@dataclass(frozen=True)
class Plan:
    """Start `ranks` processes, because of `why`; 0 gives up."""

    ranks: int
    why: str


def loaders_of(attempts: Path) -> list[dict[str, Any]]:
    """Rank 0's notes on its loaders, in the newest attempt that has any."""
    for folder in sorted(attempts.glob("[0-9]*"), reverse=True):
        if loaders := read_loaders(folder):
            return loaders
    return []


def next_ranks(ranks: int, least: int, failures: Sequence[Failure], loaders: Collection[Mapping[str, Any]]) -> Plan:
    """The number of ranks after `failures` among `ranks`: those left, or fewer, but at least `least`.

    Args:
        loaders: notes of `contracts.restart_notes.note_loader`; empty if nothing is known.
    """
    lost = _lost(failures)
    if not lost:
        return Plan(ranks, "no rank was lost")
    who = f"rank {', '.join(str(f.rank) for f in lost)} {'was' if len(lost) == 1 else 'were'} killed by {lost[0].kind}"
    if any(loader.get("fixed") for loader in loaders):
        return Plan(ranks, f"{who}, but a StreamLoader can go on only with the same number of ranks")
    left = ranks - len(lost)
    if left < least:
        return Plan(0, f"{who}, which leaves {left} of {ranks} ranks, and --ranks wants at least {least}")
    refusing = [loader for loader in loaders if not _fits(left, loader)]
    if not refusing:
        return Plan(left, who)
    which = f"global_batch {refusing[0]['global_batch']} with accumulate={refusing[0]['accumulation']}"
    fitting = next((n for n in range(left, least - 1, -1) if all(_fits(n, loader) for loader in loaders)), 0)
    if fitting:
        return Plan(fitting, f"{who}, and {left} ranks cannot divide {which}")
    return Plan(
        0, f"{who}, which leaves {left} of {ranks} ranks, and no number of ranks from {least} to {left} can divide {which}"
    )


def _lost(failures: Sequence[Failure]) -> list[Failure]:
    """The ranks that died without an own record, by the same signal as the first of them.

    After an exception no rank was lost. Nor by SIGABRT: a process sends that to itself, and torch to ranks that wait for a dead
    one.
    """
    first = Failure.first(failures)
    if first.reported or not first.kind.startswith("SIG") or first.kind == "SIGABRT":
        return []
    return sorted((f for f in failures if not f.reported and f.kind == first.kind), key=lambda f: f.rank)


def _fits(ranks: int, loader: Mapping[str, Any]) -> bool:
    places, rest = divmod(ranks, int(loader["ranks_per_place"]))
    return not rest and places > 0 and int(loader["divisible"]) % places == 0
