"""Which reference a unit has; and the reference of a loop of one's own, whose code is run in plain PyTorch, by turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from echelon.common.errors import ProveError
from echelon.loop.auto.several import Turn
from echelon.loop.own.loop_unit import LoopUnit
from echelon.prover.gradients import GradientWatch
from echelon.prover.kept_state import agreeing
from echelon.prover.micro import Micro, NotJoinable, joined
from echelon.prover.plain_window import Plain
from echelon.prover.reference import AutoReference, How, OwnReference, Pass, Reference, Shake, by_index
from echelon.prover.turns import Turns
from echelon.prover.unit_kind import UnitKind
from echelon.prover.values import balance, forget_loads, parameters_of, switch_off_dropout

__all__ = ["LoopReference", "reference_of"]

_LOOKS = 3  # how often a loop may look at its data before it trains


class LoopReference(AutoReference):
    """The loop's own code on the original model and optimizer: `window.backward` is `loss.backward()`, a step a step.

    Args:
        turns: by which the loop is given its batches.
    """

    unit: LoopUnit  # type: ignore[assignment]  # no AutoUnit: what it computes is in the loop

    def __init__(self, turns: Turns, *args: Any) -> None:
        super().__init__(*args)
        self.turns = turns
        self._trains = False  # or only a gradient is asked for
        self._has_begun = False  # the loop has taken a window

    def begin(self, *, write: bool = True) -> None:
        if not self.keeps_dropout:
            switch_off_dropout(self.unit)  # so that one batch is one update, for loops that count them
        Reference.begin(self, write=write)
        self.watch = _watched(self)

    def epoch_ended(self) -> None:
        self.turns.end_epoch()

    def update(self, k: int) -> dict[str, Any]:
        self.enter_epoch(self.updates[k][0].epoch)
        self.step_begins()
        self._trains = True
        forget_loads(self.unit)
        loss = self.backward_of_all(k)
        self._trains = False
        gradients, self.rates = self.watch.take(), self.watch.rates
        if gradients is None:
            raise ProveError(
                f"the loop took no optimizer step on the batch of update {k} in one process, but it did on the ranks."
            )
        balance(self.unit)
        self.step_done(loss)
        return {"loss": loss, "norm": self.turns.plain.norm, "gradients": gradients}

    def backward(self, passes: Sequence[Pass]) -> float:
        mean, computes = 0.0, self.computes if self.computes.dtype is not None else None
        for i, each in enumerate(passes, 1):
            self.put_back(each)
            is_last, is_first = self._trains and i == len(passes), self._trains and i == 1
            self.turns.plain = plain = Plain(each.share * self.scale, is_last, is_first, computes, self.scale)
            batch = self.as_given(each.data)
            with self.same_parameters(each):
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
            if self.unit.several is not None:  # what was put aside where optimizers would have stepped
                self.module.zero_grad()
                for turn in self.unit.several.turns:
                    turn.take_back()
            self.unscale()
        return mean


class SeveralReference(AutoReference):
    """A unit with several optimizers: each loss goes back for all ranks before its optimizers step, and the next is computed."""

    def begin(self, *, write: bool = True) -> None:
        Reference.begin(self, write=write)
        if self.records[0]["dropouts"]:
            switch_off_dropout(self.unit)
        self.watch = _watched(self)
        self.turns: list[Turn] = self.unit.several.turns  # type: ignore[union-attr]

    def _step_scheduler(self) -> None:
        self.unit.step_lr_scheduler()

    def update(self, k: int) -> dict[str, Any]:
        self.enter_epoch(self.updates[k][0].epoch)
        self.step_begins()
        forget_loads(self.unit)
        for turn in self.turns:
            turn.reset()
        loss, groups = 0.0, by_index(self.records, k)
        for number, same in enumerate(groups, 1):
            loss += self._in_turn(self._passes([m for m in same if m.weight > 0], k), steps=number == len(groups))
        for turn in self.turns:
            if turn.kept:  # the last micro-batch was padding on all ranks
                self._step(turn)
        gradients, self.rates = self.watch.take() or {}, self.watch.rates
        balance(self.unit)
        if self.unit.lr_interval == "update":
            self._step_scheduler()
        self._step_ended(k, loss, None)
        self.step_done(loss)
        return {"loss": loss, "norm": None, "gradients": gradients}

    def backward(self, passes: Sequence[Pass]) -> float:
        """Add up the gradients of each optimizer's own loss, where nothing steps; returns the mean loss."""
        mean = sum(self._in_turn([each], steps=False) for each in passes)
        self.module.zero_grad()
        for turn in self.turns:
            turn.take_back()
        return mean

    def loss_of(self, data: Any) -> torch.Tensor:
        return torch.stack([loss for _, loss in self.unit.compute_losses(self.state, self.as_given(data))]).sum()

    def _passes(self, micros: list[Micro], k: int) -> list[Pass]:
        total = sum(m.weight for m in self.updates[k])
        if micros and self.joined and (self.constant_draws or not self.drew):
            try:
                state = self._own(agreeing(m.state for m in micros))
                return [Pass(joined(micros), sum(m.weight for m in micros) / total, micros[0].streams, state)]
            except NotJoinable:
                self.joined = False
        return [Pass(m.data, m.weight / total, m.streams, self._own(m.state)) for m in micros]

    def _in_turn(self, passes: Sequence[Pass], *, steps: bool) -> float:
        """Passes of different ranks at one time; returns their part of the mean loss."""
        mean, turns = 0.0, list[Turn]()
        every = [(each, self.unit.compute_losses(self.state, self.as_given(each.data))) for each in passes]
        streams = [each.streams for each in passes]
        while every:
            turns.clear()
            for i, (each, losses) in enumerate(every):
                if i or not turns:
                    self.put_back(replace(each, streams=streams[i]))
                with self.computes.autocast(self.device):
                    made = next(losses, None)
                if each.streams:
                    streams[i] = {name: self.sources.states()[name] for name in each.streams}
                if made is None:
                    self.note_draws(each)
                    continue
                if not turns:
                    turns = self.unit.several.named(made[0])  # type: ignore[union-attr]
                    for turn in turns:
                        turn.optimizer.zero_grad()
                (made[1] * each.share).backward(retain_graph=self.unit.retain_graph)
                mean += float(made[1].detach()) * each.share
            if not turns:
                break
            for turn in turns:
                self._step(turn) if steps else turn.put_aside()
        return mean

    def _step(self, turn: Turn) -> None:
        turn.take_back()
        if self.unit.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(turn.parameters, self.unit.clip_grad_norm)
        if self.unit.clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(turn.parameters, self.unit.clip_grad_value)
        turn.optimizer.step()
        turn.updated = True


def _watched(reference: AutoReference) -> GradientWatch:
    """Make the unit's optimizers, whose steps are seen from now on."""
    unit = reference.unit
    unit.configure()
    reference.module = unit.prepared.unwrapped
    held = {id(p) for each in unit.optimizers for group in each.param_groups for p in group["params"]}
    reference.held = {n for n, p in parameters_of(unit) if id(p) in held}
    return GradientWatch(unit)


def reference_of(unit: Any, records: list[dict[str, Any]], folder: Path, dtype: torch.dtype, how: How, shake: Shake) -> Reference:
    """The reference for this kind of unit."""
    kind = UnitKind.of(unit)
    if kind.is_loop:
        return LoopReference(unit.reference, unit, records, folder, dtype, how, shake)
    made = {UnitKind.LOSS: AutoReference, UnitKind.LOSSES: SeveralReference, UnitKind.STEP: OwnReference}[kind]
    return made(unit, records, folder, dtype, how, shake)
