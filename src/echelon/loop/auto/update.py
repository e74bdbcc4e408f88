"""An update: the way from a batch to the optimizer's step, for AutoUnit and for users' own loops. Read from top to bottom.

    begin_step              one more micro-batch
    with passes(...):       no gradient traffic before the window's last micro-batch
        forward             the unit's compute_loss; a user's loop computes its own loss
        backward            weighted; the window's last starts the sums over the ranks
    complete                after the window's last micro-batch
        finish              the sums arrive; gradients become those of the global batch
        clip                by norm, by value
        step                the optimizer, then the layout's part, the averaged weights and the record
        advance             the schedule

A layout that computes all micro-batches of an update at once, in its own order, takes forward and backward together:
`run_window`. `Window` says how micro-batches are weighed.

In fp16, all ranks skip an update whose gradients overflow: parameters, schedule and averages stay as they are. They also skip an
update whose global batch weighs nothing, for example because all labels are ignored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.common.errors import LoopError, LossError
from echelon.data.prefetch import Step
from echelon.loop.agreements import checksum_of_first, warn_of_same_batches
from echelon.loop.auto.finite import FiniteWatch, check_loss
from echelon.loop.auto.loss_scale import tell_of_labels, tell_of_scale
from echelon.loop.auto.optimizer_checks import check_holds, look_at_first_update, not_the_modules, when_it_grows
from echelon.loop.auto.uncounted import standing_in
from echelon.loop.replicas import warn_of_drift
from echelon.loop.samples import as_scalar, problem_with, samples_of, sizes_in
from echelon.loop.state import step_under_way
from echelon.parallel.gradients import clip
from echelon.parallel.guards.guard import explain
from echelon.parallel.prepared import NO_CONTEXT, MicroBatch, combined
from echelon.parallel.recipe.precision import Shards, check_scaler
from echelon.parallel.state.partition import Partition, has_gradients, needs_all, parameters_of
from echelon.world import agree, clock
from echelon.world.clock import Part

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["Update"]

logger = logging.getLogger(__name__)

_FIRST_UPDATES = 10  # as many as are looked at for writes to shards: guards/lost_writes.py

# Marked in every step. As plain ints: looking up an enum member takes longer than the mark itself.
FORWARD, BACKWARD, OPTIMIZER = int(Part.FORWARD), int(Part.BACKWARD), int(Part.OPTIMIZER)


class Update:
    """The current update, and the state that one update hands to the next.

    Args:
        unit: has the module, the optimizers and the options, and keeps the saved state: its `window` and its progress. Each
            method is given the unit again: a reference cycle would keep the model's memory until garbage is collected.
        bitwise: a BitEqual, for training whose bits do not depend on the number of ranks; else None.
        stop_after: stop after this many updates in a row whose loss is not finite.
    Attributes:
        is_last: the current micro-batch is its window's last.
        joined: windows are summed over the ranks, so all ranks have the same numbers of an update.
        weight, loss: of the latest global batch.
        latest: loss of the latest update, and its gradient norm if gradients are clipped; both None before the first update.
        finite: watches that losses are finite.
    """

    def __init__(self, unit: Any, bitwise: Any, stop_after: int | None) -> None:
        self.bitwise = bitwise
        self._listeners = unit.prepared.listeners
        self.finite = FiniteWatch(stop_after)
        self.is_last = self.joined = False
        self.weight: Any = 0
        self.loss: Any = None
        self.latest: tuple[Any, Any] = (None, None)
        self._shards: Shards | None = None  # of the optimizer, for the gradient scaler
        self._first_look: RemovableHandle | None = None  # hook that checks the optimizer's parameters in the first update
        # The optimizer that was checked, while ranks train together.
        self._trains_with: torch.optim.Optimizer | None = None
        self._compared_until = 0  # replicas are compared before the steps of this many updates, if the optimizer is divided
        self._saw_loss = False
        self._others: list[nn.Parameter] = []  # the optimizer's parameters outside the module, such as a learned loss weight
        self._left: dict[nn.Parameter, torch.Tensor] = {}  # gradients of earlier updates, set aside during this one

    # --- before the first update

    def join(self, unit: Any) -> None:
        """At the start of training: find out whether its ranks train together."""
        prepared, window = unit.prepared, unit.window
        self.joined = agree.is_joined() and (prepared.data.averaged_over > 1 or prepared.forward_is_collective)
        window.group = agree.control_group() if self.joined else None
        window.may_be_empty = prepared.trains == "alone"
        # Guards expect one forward and one backward pass per micro-batch; several optimizers have more.
        window.guards = prepared.guards if self.joined and not unit.has_several else ()

    def begin(self, unit: Any) -> None:
        """At the start of training, once the optimizer is built. Collective."""
        self._check_optimizer(unit)
        if self.finite.is_long:  # an earlier call of `train` raised for it, and the caller goes on
            self.finite.forget()
        check_scaler(unit.grad_scaler, unit.computes, unit.prepared)
        if unit.grad_scaler is not None:
            self._shards = Shards(unit.optimizer, unit.module.parameters())

    def _check_optimizer(self, unit: Any) -> None:
        """Check the optimizer at every start of training: the user may have assigned another, or added parameters."""
        self._take_parameters(unit)
        self._trains_with = unit.optimizer if unit.window.group is not None and unit.several is None else None
        for optimizer in unit.optimizers:
            when_it_grows(optimizer, unit)
        if unit.window.updates == 0 and unit.several is None:
            self._first_look = look_at_first_update(unit, unit.optimizer, together=self.joined)
            if self.joined and Partition.of(unit.optimizer) is not None:
                self._compared_until = _FIRST_UPDATES

    def optimizer_grew(self, unit: Any) -> None:
        """The user has added parameters to the optimizer during training, the same on all ranks. Collective."""
        if unit.window.group is not None or not agree.is_joined():
            self._take_parameters(unit)

    def _take_parameters(self, unit: Any) -> None:
        """Have the gradients of all of the optimizer's parameters averaged, also those outside the module. Collective."""
        others: list[nn.Parameter] = []
        for optimizer in unit.optimizers:
            check_holds(unit, optimizer)
            if unit.prepared.trains == "scheduled":
                agree.raise_on_all(needs_all(optimizer, f"layout {unit.prepared.describe()['layout']!r}"))
            others += not_the_modules(unit, optimizer)
        if others and self.bitwise is not None:
            raise LoopError(
                f"the optimizer must hold parameters of the module only in bit-equal training, got {len(others)} others. Make "
                "these parameters of the module."
            )
        unit.prepared.add_extra_params(others)
        self._others = others

    # --- a micro-batch

    def begin_step(self, unit: Any, state: State) -> Step[Any]:
        """Count one more micro-batch."""
        window = unit.window
        if self.finite.is_long:  # only now: callbacks such as RollBack saw the last update and may have rolled back
            self.finite.raise_if_long(together=self.joined)
        if self._trains_with is not None and self._trains_with is not unit.optimizer and window.count == 0:
            self._check_optimizer(unit)  # the user has assigned another, on all ranks
        step = step_under_way(state.train_state)
        self.is_last = window.open(step.is_last)
        unit.samples_given = step.samples
        return step

    def estimate(self, unit: Any, state: State, micro_batch: MicroBatch[Any]) -> None:
        """Estimate the window's reference weight W0 before the first step of a run. Collective."""
        own_weight = 0.0 if unit.prepared.data.is_replica else float(micro_batch.weight)
        if unit.window.fixed or not self.joined:
            # A weight on the device never updates W0, so round it to a power of two; resumed workers have rank 0's.
            if isinstance(micro_batch.weight, torch.Tensor):
                own_weight = 2.0 ** round(math.log2(abs(own_weight) or 1.0))
            unit.window.estimate([own_weight])
            return
        seen = checksum_of_first(state.train_state, micro_batch.data) if own_weight else None
        weights, batches = zip(*agree.gather([own_weight, seen]), strict=True)
        unit.window.estimate(weights)
        warn_of_same_batches(batches)

    def passes(self, unit: Any, state: State, micro_batch: MicroBatch[Any]) -> AbstractContextManager[Any]:
        """Context of the forward and the backward pass over a micro-batch."""
        prepared, bitwise = unit.prepared, self.bitwise
        if clock.running is not None:
            clock.running.enter(FORWARD)
        if bitwise is not None:
            bitwise.begin(unit.window.updates, unit.window.count - 1)
        if unit.several is not None:
            unit.several.begin(float(micro_batch.weight))
        self.begin_forward(unit, state, micro_batch)
        if state.recorder is not None and state.recorder.counts_flops:
            state.recorder.count_flops(unit, micro_batch.data)
        accumulates: AbstractContextManager[Any] = prepared.accumulate(micro_batch.is_last or bitwise is not None)
        if unit.detect_anomaly is None and not micro_batch.is_padding:
            return accumulates
        anomaly = NO_CONTEXT if unit.detect_anomaly is None else torch.autograd.set_detect_anomaly(unit.detect_anomaly)
        return combined(standing_in(unit) if micro_batch.is_padding else NO_CONTEXT, accumulates, anomaly)

    def put_left_aside(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an update's first backward pass: set aside gradients of earlier backward passes, which the user has not cleared.
        They are complete, so this update's weight must not scale them.
        """
        if not has_gradients(optimizer):
            return
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._left[parameter] = parameter.grad.clone()  # the next backward pass may write into the gradient's memory
                parameter.grad = None

    @torch.no_grad()
    def _take_left_back(self) -> None:
        for parameter, left in self._left.items():
            parameter.grad = left if parameter.grad is None else parameter.grad.add_(left)
        self._left = {}

    def begin_forward(self, unit: Any, state: State, micro_batch: MicroBatch[Any]) -> None:
        """Give what is counted and logged in the forward pass the weight of its micro-batch."""
        unit.samples_given = micro_batch.samples
        for listener in self._listeners:
            listener.begin_forward(micro_batch.weight)
        state.logged.begins(0 if unit.prepared.data.is_replica else micro_batch.weight)

    def forward(self, unit: Any, state: State, micro_batch: MicroBatch[Any]) -> tuple[torch.Tensor, Any]:
        """Call an AutoUnit's `compute_loss` in the unit's precision. A user's own loop computes its loss itself.

        Raises:
            LossError: `compute_loss` returned something else than a loss.
        """
        if unit.computes.dtype is None:
            made: tuple[torch.Tensor, Any] = unit.compute_loss(state, micro_batch.data)
        else:
            with unit.autocast():
                made = unit.compute_loss(state, micro_batch.data)
        is_pair = type(made) is tuple and len(made) == 2 and isinstance(made[0], torch.Tensor)
        is_usual = is_pair and not made[0].dim() and made[0].requires_grad
        if not is_usual:
            if (problem := problem_with(made, unit.module)) is not None:
                raise LossError(f"{type(unit).__name__}.compute_loss returned {problem}")
            made = as_scalar(made[0]), made[1]
        if unit.detect_anomaly:
            check_loss(made[0], micro_batch.weight, unit.train_progress.num_updates_completed)
        return made

    def backward(
        self,
        unit: Any,
        state: State,
        loss: torch.Tensor,
        micro_batch: MicroBatch[Any],
        *,
        retain_graph: bool | None = None,
    ) -> None:
        """Add the gradients of this micro-batch's share in the mean over the global batch to the window's gradients.

        The window's last micro-batch averages them over the ranks, while the sums of weights and losses are under way.
        """
        prepared, window, weight = unit.prepared, unit.window, micro_batch.weight
        scheduled = prepared.trains == "scheduled"  # the layout calls this method, in its own order
        if not self._saw_loss:
            self._saw_loss = True
            self._look_at(unit, loss, micro_batch)
        if not scheduled:
            loss = prepared.before_backward(loss, micro_batch)
        window.add(loss.detach(), 0 if prepared.data.is_replica else weight)
        if not scheduled:
            if micro_batch.is_last and self.joined:
                window.start_reduction(state.stop_requested, state.logged.signature())
            if clock.running is not None:
                clock.running.enter(BACKWARD)
        assert window.reference is not None
        if window.count == 1 and not (self.joined or window.fixed) and type(weight) in (int, float):
            # A single process may set W0 anew in each window. So a hook sees the unscaled gradient of a whole global batch.
            window.reference = float(weight if weight > 0 else 1) * (1 if micro_batch.is_last else window.size)
        scale = weight * prepared.data.averaged_over / window.reference
        scaled = loss if unit.grad_scaler is None else unit.grad_scaler.scale(loss)
        # A loss that another stage computed is only counted; `grad_scaler.scale` has told the scaler its device.
        if scheduled and not loss.requires_grad:
            return
        if isinstance(scale, float) and scale == 1.0:
            scaled.backward(retain_graph=retain_graph)
        else:
            if isinstance(scale, torch.Tensor):
                clip.pass_zeros(scaled, scale == 0)
            elif scale == 0:
                clip.pass_zeros(scaled)
            # The weight is the initial gradient, so it costs no operation of its own. `new_full` fills it in on the device:
            # `new_tensor` would copy from the host and wait for all earlier kernels.
            start = scale.to(scaled) if isinstance(scale, torch.Tensor) else scaled.new_full((), scale)
            scaled.backward(gradient=start.reshape(()), retain_graph=retain_graph)
        if not scheduled:
            prepared.after_backward(loss)
            if self.bitwise is not None:
                self.bitwise.add(last=micro_batch.is_last)

    def _look_at(self, unit: Any, loss: torch.Tensor, micro_batch: MicroBatch[Any]) -> None:
        """Warn if the first loss looks like a sum over samples, or like a mean over labels."""
        if unit.expects_mean and unit.divided > 1:
            samples = samples_of(micro_batch.data, micro_batch.samples)[0]
            tell_of_scale(loss, samples, micro_batch.weight, unit.window.size, unit.divided)
            if type(micro_batch.weight) in (int, float) and micro_batch.weight == samples:
                tell_of_labels(loss, samples, sizes_in(micro_batch.data))

    def run_window(
        self,
        unit: Any,
        state: State,
        micro_batches: Sequence[MicroBatch[Any]],
        forward: Callable[[MicroBatch[Any]], tuple[torch.Tensor, Any]],
        *,
        outputs: bool,
    ) -> Iterator[tuple[torch.Tensor, Any]]:
        """Run all micro-batches of an update under the layout's schedule. Gives losses and outputs in the micro-batches' order.

        Args:
            outputs: whether the caller needs the outputs.
        """
        prepared = unit.prepared
        backward = partial(self.backward, unit, state, retain_graph=unit.retain_graph)
        for each in micro_batches:
            if state.recorder is not None and state.recorder.counts_flops:
                state.recorder.count_flops(unit, each.data)
        clock.enter(Part.STEP)  # the schedule mixes forward and backward passes
        try:
            made = prepared.forward_backward_window(micro_batches, forward, backward, outputs=outputs)
        except BaseException as error:
            explain(prepared.guards, error)
            raise
        if self.joined:
            unit.window.start_reduction(state.stop_requested, state.logged.signature())
        return iter(made)

    # --- the end of a window

    def complete(self, unit: Any, state: State) -> torch.Tensor | None:
        """Finish the update after the window's last backward pass. Returns the gradient norm if gradients are clipped."""
        self.finish(unit, state)
        norm = None if unit.window.is_nothing or unit.several is not None else self.clip(unit)
        updated = self.step(unit, state, norm)
        if unit.window.is_nothing:
            return None
        if not unit.zero_grad_at_train_step_start:
            unit.zero_grad(state)
        scheduled = (
            unit.several is not None or unit.lr_scheduler is not None or unit.swa_scheduler is not None or unit.own_schedule
        )
        if updated and scheduled and unit.lr_interval == "update":
            self.advance(unit)
        return norm

    def finish(self, unit: Any, state: State) -> None:
        """Make the gradients those of the global batch. Several optimizers have stepped by now, each in its turn."""
        window, prepared, scaler = unit.window, unit.prepared, unit.grad_scaler
        if unit.several is not None:
            unit.several.meet_at_end()
            if self.joined:
                window.start_reduction(state.stop_requested, state.logged.signature())
        if self.joined:
            clock.enter(Part.WAIT)
        micro_batches, (weight, loss, stop) = window.count, window.close()
        if clock.running is not None:
            clock.running.enter(OPTIMIZER)
        if window.guards:
            window.check_guards()
        self.finite.take(loss, window.own_loss, micro_batches, unit.train_progress)
        if stop:
            state.agree_to_stop()
        state.logged.end_window(window.told, None if unit.device.type == "cpu" else unit.device)
        self.weight, self.loss = weight, loss
        if window.is_nothing:
            self._take_left_back()
            return
        if unit.several is not None:  # each turn has scaled its gradients already
            window.reference = float(weight)
            return
        if scaler is not None:
            if self._shards is None or self._shards.optimizer is not unit.optimizer:  # the user has assigned another
                self._shards = Shards(unit.optimizer, prepared.module.parameters())
            scaler.unscale_(self._shards)
        assert window.reference is not None
        if isinstance(weight, torch.Tensor):  # on the device: do not wait for it
            # If the global batch weighs nothing, its gradients are zeros; a factor of 1 keeps them.
            self._scale(unit, torch.where(weight == 0, torch.ones_like(weight), window.reference / weight))
        elif weight != window.reference:
            self._scale(unit, window.reference / weight)
            window.reference = window.reference if window.fixed else float(weight)
        if self._left:
            self._take_left_back()

    def _scale(self, unit: Any, factor: float | torch.Tensor) -> None:
        clip.scale_((*unit.prepared.module.parameters(), *self._others), factor)

    def clip(self, unit: Any) -> torch.Tensor | None:
        """Clip complete gradients before the optimizer's step. Returns their norm if they are clipped by norm."""
        norm: torch.Tensor | None = None
        if unit.clip_grad_norm is not None:
            norm = self.clip_norm(unit, unit.clip_grad_norm)
        if unit.clip_grad_value is not None:
            self.clip_value(unit, unit.clip_grad_value)
        return norm

    def clip_norm(self, unit: Any, most: float) -> torch.Tensor:
        norm: torch.Tensor = unit.prepared.clip_grad_norm_(most)
        return norm

    def clip_value(self, unit: Any, most: float) -> None:
        clip.clip_by_value_(unit.prepared.module.parameters(), most)

    def step(self, unit: Any, state: State, norm: torch.Tensor | None) -> bool:
        """Step the optimizer, the averages and the record. False if fp16's scaler or a batch without weight skipped the step."""
        prepared, alone = unit.prepared, unit.several is None
        if unit.window.is_nothing:
            self._leave_out(unit, state)
            return False
        self.latest, lr = (self.loss, norm), unit.optimizer.param_groups[0].get("lr") if alone else None
        if (self._first_look is not None and self.joined) or unit.window.updates <= self._compared_until:
            warn_of_drift(unit)  # before the step, in which a divided optimizer sends its values to all
        updated = self.step_optimizer(unit) if alone else True
        for listener in self._listeners:
            listener.end_window(updated=updated)
        if updated:
            if self._first_look is not None:
                self._first_look.remove()
                self._first_look = None
                if self.joined:
                    warn_of_drift(unit)
            if alone and prepared.after_step(state.stop_requested):
                state.agree_to_stop()
            if unit.swa_model is not None:
                unit.swa_model.step()
        self._record(unit, state, lr, norm)
        return updated

    def step_optimizer(self, unit: Any) -> bool:
        """Step the one optimizer. False if fp16's scaler skipped the update."""
        scaler = unit.grad_scaler
        if scaler is None:
            unit.optimizer.step()
            return True
        assert self._shards is not None
        updated = self._shards.update_with(scaler)
        self.finite.take_skip(not updated, scaler)
        return updated

    def _record(self, unit: Any, state: State, lr: Any, norm: torch.Tensor | None) -> None:
        if state.recorder is None:
            return
        numbers = {} if unit.several is None else unit.several.numbers()
        for listener in self._listeners:
            numbers.update(listener.measures())
        numbers.update(state.logged.settled())
        state.recorder.update(unit.train_progress.num_updates_completed + 1, self.loss, self.weight, lr, norm, numbers)

    def _leave_out(self, unit: Any, state: State) -> None:
        """Skip the update of a global batch that weighs nothing, on all ranks. It is counted, but trains nothing."""
        loss = self.latest[0]
        # This update has no loss; repeating the last one serves callers that average the losses of updates.
        self.latest = (0.0 if loss is None else loss, None)
        for listener in self._listeners:
            listener.end_window(updated=False)
        unit.zero_grad(state)
        window = unit.window
        if agree.is_rank0() and window.empty & (window.empty - 1) == 0:  # warn at 1, 2, 4, 8, ...
            logger.warning(
                "update %s was skipped because its global batch weighs 0: all of its samples were filtered out, or all of its "
                "labels ignored. Parameters and schedule stay as they are. Skipped so far: %s of %s updates",
                window.updates - 1,
                window.empty,
                window.updates,
            )

    def advance(self, unit: Any) -> None:
        """Advance the schedule after an update or an epoch, as `lr_interval` says; once averaging has begun, its own schedule."""
        if unit.swa_scheduler is not None and unit.swa_model is not None and unit.swa_model.begun:
            unit.swa_scheduler.step()
        else:
            unit.step_lr_scheduler()

    # --- unfinished windows, and the end

    def discard(self, unit: Any, state: State) -> None:
        """Forget an unfinished window, and its gradients."""
        unit.window.discard()
        for each in (unit.several, self.bitwise):
            if each is not None:
                each.discard()
        unit.prepared.discard_window()
        unit.zero_grad(state)

    def end_epoch(self, unit: Any, state: State) -> None:
        if unit.window.count:
            logger.warning("the epoch ended within an accumulation window; the micro-batches of this window are dropped")
            self.discard(unit, state)
            state.logged.discard()
        if unit.lr_interval == "epoch":
            self.advance(unit)

    def end(self, unit: Any, *, complete: bool) -> None:
        """Training ends: `complete`, or interrupted. Collective if complete."""
        window = unit.window
        window.group = self._trains_with = None
        if complete:
            unit.prepared.end_training()
            if 0 < window.updates == window.empty:
                raise window.weightless()
            self.finite.finish(window.updates, together=self.joined)
            if unit.swa_model is not None and agree.is_rank0():
                unit.swa_model.warn_if_unused()
