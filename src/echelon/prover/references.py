"""Which reference a unit has; and the reference of a loop of one's own, whose code is run in plain PyTorch, by turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from echelon.contracts.errors import ProveError
from echelon.loop.auto.auto import AutoUnit
from echelon.loop.own.unit import LoopUnit, Plain
from echelon.prover.gradients import GradientWatch
from echelon.prover.reference import AutoReference, How, OwnReference, Pass, Reference, Shake
from echelon.prover.turns import Turns
from echelon.prover.values import balance, forget_loads, parameters_of, switch_off_dropout

__all__ = ["LoopReference", "reference_of"]

_LOOKS = 3  # how often a loop may look at its data before it trains


class LoopReference(AutoReference):
    """The loop's own code on the original model and optimizer: `window.backward` is `loss.backward()`, a step a step.

    Args:
        turns: by which the loop is given its batches.
    """

    unit: LoopUnit

    def __init__(self, turns: Turns, *args: Any) -> None:
        super().__init__(*args)
        self.turns = turns
        self._trains = False  # or only a gradient is asked for
        self._has_begun = False  # the loop has taken a window

    def begin(self, *, write: bool = True) -> None:
        if not self.keeps_dropout:
            switch_off_dropout(self.unit)  # so that one batch is one update, for loops that count them
        Reference.begin(self, write=write)
        self.unit.configure()
        self.module = self.unit.prepared.unwrapped
        held = {id(p) for each in self.unit.optimizers for group in each.param_groups for p in group["params"]}
        self.held = {n for n, p in parameters_of(self.unit) if id(p) in held}
        self.watch = GradientWatch(self.unit)

    def epoch_ended(self) -> None:
        self.turns.end_epoch()

    def update(self, k: int) -> dict[str, Any]:
        self.enter_epoch(self.updates[k][0].epoch)
        self._trains = True
        forget_loads(self.unit)
        loss = self.backward_of_all(k)
        self._trains = False
        assert self.unit.plain is not None
        gradients, self.rates = self.watch.take(), self.watch.rates
        if gradients is None:
            raise ProveError(
                f"the loop took no optimizer step on the batch of update {k} in one process, but it did on the ranks."
            )
        balance(self.unit)
        self.step_done()
        return {"loss": loss, "norm": self.unit.plain.norm, "gradients": gradients}

    def backward(self, passes: Sequence[Pass]) -> float:
        mean, computes = 0.0, self.computes if self.computes.dtype is not None else None
        for i, each in enumerate(passes, 1):
            self.put_back(each)
            is_last, is_first = self._trains and i == len(passes), self._trains and i == 1
            self.unit.plain = plain = Plain(each.share * self.scale, is_last, is_first, computes, self.scale)
            batch = self.as_given(each.data)
            self.turns.give(batch)
            for _ in range(_LOOKS):
                if self._has_begun or plain.loss is not None:
                    break
                self.turns.again(batch)
            self._has_begun = True
            if plain.loss is None:
                raise ProveError("the loop took no window of a batch in one process, but it did on the ranks.")
            self.note_draws(each)
            mean += float(plain.loss) * each.share
        if not self._trains:
            self.unscale()
        return mean

    def try_loss(self, data: Any) -> float:
        loss = self.backward([Pass(data)])
        self.module.zero_grad()
        return loss


def reference_of(unit: Any, records: list[dict[str, Any]], folder: Path, dtype: torch.dtype, how: How, shake: Shake) -> Reference:
    """The reference for this kind of unit."""
    if isinstance(unit, LoopUnit):
        return LoopReference(unit.turns, unit, records, folder, dtype, how, shake)
    kind = AutoReference if isinstance(unit, AutoUnit) else OwnReference
    return kind(unit, records, folder, dtype, how, shake)
