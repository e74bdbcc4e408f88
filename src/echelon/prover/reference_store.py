"""The references of a proof: each is computed once, for all rows that trained on the same data."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from echelon.common.errors import RankFailedError
from echelon.prover.micro import Micro, NotJoinable, digest, join
from echelon.prover.on_ranks import OnRanks
from echelon.prover.probe import UNKNOWN, probe
from echelon.prover.ran import Computed, Ran
from echelon.prover.rank import run_reference
from echelon.prover.reference import Reference, Shake, by_index, micros_in_order
from echelon.prover.unit_kind import UnitKind

__all__ = ["SHAKES", "ReferenceStore", "are_alike", "data_of"]

SHAKES = 3


class ReferenceStore:
    """
    Args:
        folder: for what the references leave.
    """

    def __init__(self, on_ranks: OnRanks, folder: Path) -> None:
        self._on_ranks, self.folder = on_ranks, folder
        self._known: list[tuple[_Data, Computed]] = []

    def of(self, ran: Ran) -> Computed:
        """That of a row, computed once for all rows on the same data, or on the first updates of it."""
        data = data_of(ran)
        for known, reference in self._known:
            if are_alike(data, known) and len(data[1]) <= len(known[1]):
                return reference
        folder = self.folder / f"reference-{len(self._known)}"
        shutil.rmtree(folder, ignore_errors=True)  # of one that could not be computed for the row before
        folder.mkdir()
        self._known.append((data, self._computed(ran, folder)))
        return self._known[-1][1]

    def _computed(self, ran: Ran, folder: Path) -> Computed:
        """The reference, and in float32 a first sample of what rounding does to it; in half precision more."""
        replay = self._on_ranks.replay(ran, folder)
        reference = Computed(folder, self._on_ranks.launch(run_reference, 1, replay))
        if ran.dtype is torch.float64:
            return reference
        half = ran.narrow
        if half is not None:
            self.shake(ran, reference, SHAKES - 1, half)
        if ran.is_auto:  # a unit with a step of its own may have wrapped its module in something with float32 built in
            with contextlib.suppress(RankFailedError):  # so may a forward pass
                if self._on_ranks.launch(run_reference, 1, replay, Reference.run, "wide")["draws"] == reference.facts["draws"]:
                    return reference
            for other in folder.glob("again-wide-*"):
                shutil.rmtree(other)
        if half is None:
            self.shake(ran, reference, 1, None)
        return reference

    def shake(self, ran: Ran, reference: Computed, samples: int, narrowest: torch.dtype | None) -> None:
        """See to it that there are so many shaken references, by the rounding of the narrowest type if one is given."""
        replay = self._on_ranks.replay(ran, reference.folder)
        rounding = torch.finfo(narrowest).eps if narrowest is not None else None
        if rounding is not None and ran.narrow is not None:
            rounding /= 4  # what a cast of each weight changes on average
        updates = len(ran.records[0]["updates"])
        known, length = reference.shaken if updates <= reference.shaken[1] else (0, updates)
        for sample in range(0 if narrowest is not None else known, samples):
            self._on_ranks.launch(run_reference, 1, replay, Reference.run, "shaken", Shake(sample, rounding))
        reference.shaken = max(samples, known), length

    def probed(self, ran: Ran, reference: Computed) -> dict[str, Any]:
        if reference.probed is None:
            reference.probed = dict(UNKNOWN)
            with contextlib.suppress(RankFailedError):
                reference.probed = self._on_ranks.launch(run_reference, 1, self._on_ranks.replay(ran, self.folder), probe)
        return reference.probed

    def state(self, ran: Ran, reference: Computed) -> dict[str, list[str]]:
        """What the unit keeps between passes, as far as it matters: paths by name."""
        keeps = any(m.state for r in ran.records for u in r["updates"] for m in u)
        return dict(self.probed(ran, reference)["state"]) if keeps else {}


_Data = tuple[Any, Sequence[Any]]


def are_alike(one: _Data, other: _Data) -> bool:
    """Whether one goes on as the other begins."""
    return one[0] == other[0] and all(a == b for a, b in zip(one[1], other[1], strict=False))


def data_of(ran: Ran) -> _Data:
    """What the reference of a row depends on: how it trains, and on what in each update. Rows with the same share it.

    As a rule the samples of each update alone, whichever ranks had them. Dropped units depend on the micro-batches and on the
    RNGs in front of them; a step of one's own, which may accumulate, on which micro-batches came at the same time, and so do
    several optimizers, as a loss meets what has stepped before it.
    """
    row, first, merged = ran.row, ran.records[0], micros_in_order(ran.records)
    states = [{path: m.state[path] for path in sorted(row.restores & m.state.keys())} for u in merged for m in u]
    as_script = row.yours and bool(row.compiles or row.half)
    kept = row.restores, digest(states) if row.restores else 0
    how = (
        ran.dtype,
        row.optimizer,
        row.narrow,
        row.workers,
        row.constant_draws,
        row.apart,
        first["by_sample"],
        row.drawn_alike,
        as_script,
        kept,
    )
    at_once = first["kind"] in (UnitKind.STEP, UnitKind.LOSSES)
    drawn = not row.constant_draws and first["kind"] is not UnitKind.STEP and any(m.streams for u in merged for m in u)

    def of_update(k: int) -> tuple[Any, ...]:
        epoch, same = first["updates"][k][0].epoch, by_index(ran.records, k)
        if drawn:
            sizes = tuple(map(len, same)) if at_once else ()
            return epoch, sizes, *((digest(m.plain), digest(m.streams)) for m in merged[k])
        return epoch, *map(_digest_of_samples, same if at_once else [merged[k]])

    return how, [of_update(k) for k in range(len(merged))]


def _digest_of_samples(micros: list[Micro]) -> Any:
    try:
        return digest(join([m.plain for m in micros], [m.samples for m in micros]))
    except NotJoinable:
        return tuple(digest(m.plain) for m in micros)
