"""The references of units: of a loss, of several optimizers in turn, and of a step of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from echelon.common.errors import ProveError
from echelon.loop.auto.auto import AutoUnit, TrainStepResults
from echelon.loop.auto.several import Turn
from echelon.loop.auto.update import Update
from echelon.prover.gradients import GradientWatch, rates_of
from echelon.prover.micro import Micro, NotJoinable, joined, widened
from echelon.prover.pass_state import agreeing, unlike
from echelon.prover.records import by_index
from echelon.prover.reference import Pass, Reference
from echelon.prover.values import (
    Values,
    as_real,
    balance,
    forget_loads,
    loss_in,
    number_in,
    parameters_of,
    switch_off_dropout,
)

__all__ = ["AutoReference", "OwnReference"]


class AutoReference(Reference):
    """The reference of an AutoUnit: its loss and its optimizer in a plain training loop."""

    unit: AutoUnit[Any]
    hears = True  # the unit's on_train_step_end is called

    def begin(self, *, write: bool = True) -> None:
        super().begin(write=write)
        unit = self.unit
        self.module = unit.prepared.unwrapped
        self.optimizer, self.scheduler = unit.configure_optimizers_and_lr_scheduler(self.module)
        unit.optimizer, unit.lr_scheduler = self.optimizer, self.scheduler  # the unit's hooks may look at them
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self.held = {n for n, p in parameters_of(unit) if id(p) in held}

    def watch_optimizers(self) -> GradientWatch:
        """Make the unit's optimizers, and watch their steps from now on."""
        unit = self.unit
        unit.configure()
        self.module = unit.prepared.unwrapped
        held = {id(p) for each in unit.optimizers for group in each.param_groups for p in group["params"]}
        self.held = {n for n, p in parameters_of(unit) if id(p) in held}
        return GradientWatch(unit)

    def epoch_ended(self) -> None:
        if self.unit.lr_interval == "epoch":
            self._step_scheduler()

    def _step_scheduler(self) -> None:
        if type(self.unit).step_lr_scheduler is not AutoUnit.step_lr_scheduler:
            self.unit.step_lr_scheduler()
        elif self.scheduler is not None and not isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step()  # a plateau shows in evaluations, and there are none here

    def update(self, k: int) -> dict[str, Any]:
        self.enter_epoch(self.updates[k][0].epoch)
        self.step_begins()
        forget_loads(self.unit)
        if type(self.unit).zero_grad is not AutoUnit.zero_grad:  # it may have hooks, or clear gradients in the next pass
            self.unit.zero_grad(self.state)
        loss = self.backward_of_all(k)
        if (after_backward := getattr(self.unit._update, "after_backward", None)) is not None:
            after_backward(self.unit)
        norm = self._clip()
        gradients = self.gradients()
        self.rates.append(rates_of(self.optimizer))
        self._step_optimizer()
        self.optimizer.zero_grad()
        balance(self.unit)
        if self.unit.lr_interval == "update":
            self._step_scheduler()
        self._step_ended(k, loss, norm)
        self.step_done(loss)
        return {"loss": loss, "norm": norm, "gradients": gradients}

    def _step_ended(self, k: int, loss: float, norm: float | None) -> None:
        """Call the unit's own hook, which may train a teacher or set learning rates."""
        unit = self.unit
        if not self.hears or type(unit).on_train_step_end is AutoUnit.on_train_step_end:
            return
        results = TrainStepResults(torch.tensor(loss), None if norm is None else torch.tensor(norm), None)
        try:
            unit.on_train_step_end(self.state, self.as_given(self.updates[k][-1].data), k, results)
        except Exception as error:  # it may need what only a whole loop has
            self.hears = False
            self._note_failure(f"{type(unit).__name__}.on_train_step_end", error)

    def backward_of_all(self, k: int) -> float:
        """Compute the gradient of the whole global batch, in one pass if possible; returns its mean loss."""
        micros = self.updates[k]
        self.scale = self.records[0].scales[k] if self.how != "wide" and self.records[0].scales else 1.0
        if self.joined and (self.constant_draws or not self.drew):
            try:
                return self.backward(self._joined_passes(k))
            except NotJoinable:
                self.joined = False
            except Exception:  # such as lists of images, or too much for the memory of one process
                if len(micros) == 1:
                    raise
                self.joined = False
                self.module.zero_grad()
        total = sum(m.weight for m in micros)
        at_once = [[m for m in same if m.weight > 0] for same in by_index(self.records, k)]
        return self.backward(
            [
                Pass(m.data, m.weight / total, m.streams, self._own(m.state), beside=m is not same[-1])
                for same in at_once
                for m in same
            ]
        )

    def _joined_passes(self, k: int) -> list[Pass]:
        """One pass over all samples; or one for each micro-batch index, if restored state changes between micro-batches."""
        micros = self.updates[k]
        groups = [micros]
        if any(self.restores & unlike(a.state, b.state) for r in self.records for a, b in pairwise(r.updates[k])):
            groups = [[m for m in same if m.weight > 0] for same in by_index(self.records, k)]
        total = sum(m.weight for m in micros)
        return [
            Pass(
                joined(same),
                sum(m.weight for m in same) / total,
                same[0].streams,
                self._own(agreeing(m.state for m in same)),
            )
            for same in groups
            if same
        ]

    def _own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {path: value for path, value in state.items() if path in self.restores}

    def backward(self, passes: Sequence[Pass]) -> float:
        """Add up the gradients; returns the mean loss."""
        mean, before_backward = 0.0, getattr(self.unit._update, "before_backward", None)
        for each in passes:
            self.put_back(each)
            with self.same_parameters(each):
                with self.computes.autocast(self.device):
                    loss = self.loss_of(each.data)
                self.note_draws(each)
                if before_backward is not None:
                    before_backward(self.unit, loss)
                (loss * (each.share * self.scale)).backward()
            mean += float(loss.detach()) * each.share
        self.unscale()
        return mean

    def unscale(self) -> None:
        """Divide the gradients by the scale, a power of 2."""
        for parameter in self.module.parameters() if self.scale != 1 else ():
            if parameter.grad is not None:
                parameter.grad /= self.scale

    def try_pass(self, passes: Sequence[Pass]) -> tuple[float, Values]:
        return self.backward(passes), self.gradients()

    def as_given(self, data: Any) -> Any:
        """A batch as the unit gets it."""
        return widened(data, self.dtype, self.device)

    def loss_of(self, data: Any) -> torch.Tensor:
        return self.unit.compute_loss(self.state, self.as_given(data))[0]

    def _step_optimizer(self) -> None:
        unit = self.unit
        if unit.kind_of_update.step_optimizer is not Update.step_optimizer and unit.grad_scaler is None:
            unit._update.step_optimizer(unit)
        else:
            self.optimizer.step()

    def _clip(self) -> float | None:
        norm, unit = None, self.unit
        if unit.kind_of_update.clip is not Update.clip:
            unit._update.clip(unit)
            return None
        if unit.clip_grad_norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), unit.clip_grad_norm))
        if unit.clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(self.module.parameters(), unit.clip_grad_value)
        return norm


class SeveralReference(AutoReference):
    """The reference of a unit with several optimizers: the backward pass of each loss runs for all ranks, then its optimizers
    step, then the next loss is computed.
    """

    def begin(self, *, write: bool = True) -> None:
        Reference.begin(self, write=write)
        self.watch = self.watch_optimizers()
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
        """Add up the gradients of each optimizer's own loss, without steps; returns the mean loss."""
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
        """Run passes of different ranks side by side, loss by loss; returns their part of the mean loss."""
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


class OwnReference(Reference):
    """The reference of a unit with a `train_step` of its own, which gets micro-batches joined over the ranks, and accumulates
    and steps as it likes.
    """

    @property
    def drew(self) -> bool:
        return False  # dropout is off

    def begin(self, *, write: bool = True) -> None:
        if not self.keeps_dropout:
            switch_off_dropout(self.unit)
        super().begin(write=write)
        self.watch = GradientWatch(self.unit)

    def epoch_ended(self) -> None:
        """Nothing: the unit's own hook does everything."""

    def update(self, k: int) -> dict[str, Any]:
        losses = []
        for same in by_index(self.records, k):
            self.enter_epoch(same[0].epoch)
            self.step_begins()
            loss = self.step(self.whole_batch(same))
            self.unit.on_train_step_end(self.state)
            self.step_done(loss)
            losses.append((loss, sum(m.weight for m in same)))
        known = [(loss, weight) for loss, weight in losses if loss is not None]
        mean = sum(loss * weight for loss, weight in known) / sum(w for _, w in known) if known else None
        gradients = self.watch.take() or {}
        self.held, self.rates = self.watch.held, self.watch.rates
        return {"loss": mean, "norm": None, "gradients": gradients}

    def stepping(self) -> list[torch.optim.Optimizer]:
        return list(self.unit.tracked_optimizers().values())

    def try_pass(self, passes: Sequence[Pass]) -> tuple[float, Values]:
        losses = []
        for each in passes:
            self.put_back(each)
            losses.append(self.step(each.data))
        known = [loss for loss in losses if loss is not None]
        return sum(known) / len(known) if known else float("nan"), as_real(self.watch.take() or {})

    def step(self, batch: Any) -> float | None:
        self.draws_for(batch)
        with self.computes.autocast(self.device):
            return number_in(loss_in(self.unit.train_step(self.state, widened(batch, self.dtype, self.device))))

    def whole_batch(self, micros: list[Micro]) -> Any:
        try:
            return joined(micros)
        except NotJoinable as why:
            raise ProveError(
                f"{type(self.unit).__name__} steps by itself, and the micro-batches of the ranks cannot be joined into the one "
                f"batch that a single process would get ({why})."
            ) from why
