"""An update: a batch's way to the optimizer's step, read from top to bottom. AutoUnit goes it, and a loop of one's own.

    begin_step              one more micro-batch
    with passes(...):       no gradient traffic before the window's last micro-batch
        forward             compute_loss of the unit; a loop has its own
        backward            weighted; with the last, the sums over the ranks set out
    complete                after the last
        finish              the sums arrive, gradients become those of the global batch
        clip                by norm, by value
        step                optimizer, what the layout and the averages do after it, the record for whoever watches
        advance             the schedule

A layout that computes all micro-batches of an update at once, in an order of its own, takes the two in the middle together:
`run_window`. `Window` says how micro-batches are weighed.

In fp16 an update with an inf is skipped on all ranks: parameters, schedule and averages stay as they are. So is one whose global
batch weighs nothing, as where all labels are left out.
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
from echelon.loop.auto.bitwise import BitEqual
from echelon.loop.auto.finite import FiniteWatch, check_loss
from echelon.loop.auto.loss_scale import tell_of_labels, tell_of_scale
from echelon.loop.auto.optimizer_checks import check_holds, look_at_first_update, not_the_modules, when_it_grows
from echelon.loop.auto.uncounted import standing_in
from echelon.loop.samples import as_scalar, problem_with, samples_of, sizes_in
from echelon.loop.state import step_under_way
from echelon.parallel.gradients import clip
from echelon.parallel.prepared import NO_CONTEXT, Listener, MicroBatch, combined
from echelon.parallel.recipe.precision import Shards, check_scaler
from echelon.parallel.state.partition import has_gradients, parameters_of
from echelon.world import agree, clock
from echelon.world.clock import Part

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["Update"]

logger = logging.getLogger(__name__)

# Marks of every step: asking the enumeration takes longer than making the mark.
FORWARD, BACKWARD, OPTIMIZER = int(Part.FORWARD), int(Part.BACKWARD), int(Part.OPTIMIZER)


class Update:
    """The update under way, and what follows from one to the next.

    Args:
        unit: whose module, optimizers and options it works with, and which keeps what is saved: its `window` and its progress.
            Each call is given it: a cycle of the two would keep a model's memory until somebody collects cycles.
        bitwise: for training whose bits do not depend on the number of ranks.
        stop_after: updates in a row whose loss is not finite.
    Attributes:
        is_last: the micro-batch under way ends its window.
        joined: windows are summed over ranks, so that the numbers of an update are the same on all.
        weight, loss: of the latest global batch.
        latest: the loss of the latest update, and the gradient's norm if it is clipped; both None before the first.
        finite: whether losses are.
    """

    def __init__(self, unit: Any, bitwise: BitEqual | None, stop_after: int | None) -> None:
        self.bitwise = bitwise
        self._listeners: list[Listener] = unit.prepared.listeners
        self.finite = FiniteWatch(stop_after)
        self.is_last = self.joined = False
        self.weight: Any = 0
        self.loss: Any = None
        self.latest: tuple[Any, Any] = (None, None)
        self._shards: Shards | None = None  # of the optimizer, for the gradient scaler
        self._first_look: RemovableHandle | None = None  # at what the optimizer holds
        # The one that was looked at, while ranks train together.
        self._trains_with: torch.optim.Optimizer | None = None
        self._saw_loss = False
        self._others: list[nn.Parameter] = []  # what the optimizer trains besides the module, as a learned weight of a loss
        self._left: dict[nn.Parameter, torch.Tensor] = {}  # gradients of earlier updates, as long as one is under way

    # --- before the first

    def join(self, unit: Any) -> None:
        """Training begins: do its ranks train together?"""
        prepared, window = unit.prepared, unit.window
        self.joined = agree.is_joined() and (prepared.data.averaged_over > 1 or prepared.forward_is_collective)
        window.group = agree.control_group() if self.joined else None
        window.may_be_empty = prepared.trains == "alone"
        # Those of several steps have other passes.
        window.guards = prepared.guards if self.joined and not unit.has_several else ()

    def begin(self, unit: Any) -> None:
        """With the optimizer that there is by now. Collective."""
        self._check_optimizer(unit)
        if self.finite.is_long:  # of an earlier call; the caller has caught it
            self.finite.forget()
        check_scaler(unit.grad_scaler, unit.computes, unit.prepared)
        if unit.grad_scaler is not None:
            self._shards = Shards(unit.optimizer, unit.module.parameters())

    def _check_optimizer(self, unit: Any) -> None:
        """At every start of training, whoever made it: it may have been assigned, or been given more parameters."""
        self._take_parameters(unit)
        self._trains_with = unit.optimizer if unit.window.group is not None and unit.several is None else None
        for optimizer in unit.optimizers:
            when_it_grows(optimizer, unit)
        if unit.window.updates == 0 and unit.several is None:
            self._first_look = look_at_first_update(unit, unit.optimizer, together=self.joined)

    def optimizer_grew(self, unit: Any) -> None:
        """While it trains, somebody has given the optimizer more parameters, on all ranks alike. Collective."""
        if unit.window.group is not None or not agree.is_joined():
            self._take_parameters(unit)

    def _take_parameters(self, unit: Any) -> None:
        """See to it that the gradients of all that the optimizer holds are averaged. Collective."""
        others: list[nn.Parameter] = []
        for optimizer in unit.optimizers:
            check_holds(unit, optimizer)
            others += not_the_modules(unit, optimizer)
        if others and self.bitwise is not None:
            raise LoopError(
                f"bit-equal training needs an optimizer of the module's parameters only, got {len(others)} others. Move them."
            )
        unit.prepared.add_extra_params(others)
        self._others = others

    # --- a micro-batch

    def begin_step(self, unit: Any, state: State) -> Step[Any]:
        """Count one more micro-batch."""
        window = unit.window
        if self.finite.is_long:  # here: callbacks such as RollBack have seen the update before, and may have gone back
            self.finite.raise_if_long(together=self.joined)
        if self._trains_with is not None and self._trains_with is not unit.optimizer and window.count == 0:
            self._check_optimizer(unit)  # another was assigned, on all ranks alike
        step = step_under_way(state.train_state)
        self.is_last = window.open(step.is_last)
        unit.samples_given = step.samples
        return step

    def estimate(self, unit: Any, state: State, micro_batch: MicroBatch[Any]) -> None:
        """Before the passes of the first step of a run, whose window has no reference yet. Collective."""
        own_weight = 0.0 if unit.prepared.data.is_replica else float(micro_batch.weight)
        if unit.window.fixed or not self.joined:
            if isinstance(micro_batch.weight, torch.Tensor):  # it stays; workers that resume have rank 0's
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

    def explain(self, unit: Any, error: BaseException) -> None:
        """A pass has raised this.

        Raises:
            UsageError: in the place of torch's error, which is its cause, if that says nothing of what is wrong.
        """
        for guard in unit.prepared.guards:
            if (explanation := guard.explain(error)) is not None:
                raise explanation.with_traceback(error.__traceback__) from error  # whose line it is

    def put_left_aside(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the first backward pass of an update, where a loop may leave gradients of earlier ones: these are right already,
        whatever this one's global batch weighs.
        """
        if not has_gradients(optimizer):
            return
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._left[parameter] = parameter.grad.clone()  # which may be memory that the next pass writes into
                parameter.grad = None

    @torch.no_grad()
    def _take_left_back(self) -> None:
        for parameter, left in self._left.items():
            parameter.grad = left if parameter.grad is None else parameter.grad.add_(left)
        self._left = {}

    def begin_forward(self, unit: Any, state: State, micro_batch: MicroBatch[Any]) -> None:
        """What is counted and logged in the pass counts as much as its micro-batch."""
        unit.samples_given = micro_batch.samples
        for listener in self._listeners:
            listener.begin_forward(micro_batch.weight)
        state.logged.begins(0 if unit.prepared.data.is_replica else micro_batch.weight)

    def forward(self, unit: Any, state: State, micro_batch: MicroBatch[Any]) -> tuple[torch.Tensor, Any]:
        """The loss and the outputs of an AutoUnit, in its precision; a loop of one's own computes its own.

        Raises:
            LossError: that is no loss.
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
        """The gradients of this rank's part of the mean over the global batch are added to those of the window so far.

        With the window's last, they are averaged over the ranks; the sums of weights and losses are on their way meanwhile.
        """
        prepared, window, weight = unit.prepared, unit.window, micro_batch.weight
        scheduled = prepared.trains == "scheduled"  # this is called in an order of the layout's
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
            # Nothing of earlier windows decides; and of a whole global batch a hook sees the gradient as it is.
            window.reference = float(weight if weight > 0 else 1) * (1 if micro_batch.is_last else window.size)
        scale = weight * prepared.data.averaged_over / window.reference
        scaled = loss if unit.grad_scaler is None else unit.grad_scaler.scale(loss)
        if scheduled and not loss.requires_grad:  # of another stage: it only counts, and has the scaler know its device
            return
        if isinstance(scale, float) and scale == 1.0:
            scaled.backward(retain_graph=retain_graph)
        else:
            if isinstance(scale, torch.Tensor):
                clip.pass_zeros(scaled, scale == 0)
            elif scale == 0:
                clip.pass_zeros(scaled)
            # As the first gradient of the chain rule: the weight costs no operation of its own. It is filled in on the device:
            # a copy from the host, as `new_tensor` makes it, would wait for all kernels before.
            start = scale.to(scaled) if isinstance(scale, torch.Tensor) else scaled.new_full((), scale)
            scaled.backward(gradient=start.reshape(()), retain_graph=retain_graph)
        if not scheduled:
            prepared.after_backward(loss)
            if self.bitwise is not None:
                self.bitwise.add(last=micro_batch.is_last)

    def _look_at(self, unit: Any, loss: torch.Tensor, micro_batch: MicroBatch[Any]) -> None:
        """Does the first loss look like a sum over samples, or like a mean over labels?"""
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
        """All micro-batches of an update, where the layout schedules them. Gives losses and outputs in their order.

        Args:
            outputs: whether somebody looks at them.
        """
        prepared = unit.prepared
        backward = partial(self.backward, unit, state, retain_graph=unit.retain_graph)
        for each in micro_batches:
            if state.recorder is not None and state.recorder.counts_flops:
                state.recorder.count_flops(unit, each.data)
        clock.enter(Part.STEP)  # in any order
        try:
            made = prepared.forward_backward_window(micro_batches, forward, backward, outputs=outputs)
        except BaseException as error:
            self.explain(unit, error)
            raise
        if self.joined:
            unit.window.start_reduction(state.stop_requested, state.logged.signature())
        return iter(made)

    # --- the end of a window

    def complete(self, unit: Any, state: State) -> torch.Tensor | None:
        """What follows the last backward pass. Returns the gradient norm, if it is clipped."""
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
        """The gradients become those of the global batch. Several optimizers have stepped by now, each in its turn."""
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
        if unit.several is not None:  # whose gradients are so already
            window.reference = float(weight)
            return
        if scaler is not None:
            if self._shards is None or self._shards.optimizer is not unit.optimizer:  # another was assigned
                self._shards = Shards(unit.optimizer, prepared.module.parameters())
            scaler.unscale_(self._shards)
        assert window.reference is not None
        if isinstance(weight, torch.Tensor):  # on a device: nothing waits for it
            # Gradients of no weight are zeros, and stay so.
            self._scale(unit, torch.where(weight == 0, torch.ones_like(weight), window.reference / weight))
        elif weight != window.reference:
            self._scale(unit, window.reference / weight)
            window.reference = window.reference if window.fixed else float(weight)
        if self._left:
            self._take_left_back()

    def _scale(self, unit: Any, factor: float | torch.Tensor) -> None:
        clip.scale_((*unit.prepared.module.parameters(), *self._others), factor)

    def clip(self, unit: Any) -> torch.Tensor | None:
        """Of whole gradients, before the optimizer's step. Returns their norm, if they are clipped by it."""
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
        """The optimizer's, and what follows from it. False if it was left out: by fp16's scaler, or of a batch without weight."""
        prepared, alone = unit.prepared, unit.several is None
        if unit.window.is_nothing:
            self._leave_out(unit, state)
            return False
        self.latest, lr = (self.loss, norm), unit.optimizer.param_groups[0].get("lr") if alone else None
        updated = self.step_optimizer(unit) if alone else True
        for listener in self._listeners:
            listener.end_window(updated=updated)
        if updated:
            if self._first_look is not None:
                self._first_look.remove()
                self._first_look = None
            if alone and prepared.after_step(state.stop_requested):
                state.agree_to_stop()
            if unit.swa_model is not None:
                unit.swa_model.step()
        self._record(unit, state, lr, norm)
        return updated

    def step_optimizer(self, unit: Any) -> bool:
        """False if fp16's scaler left the update out."""
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
        """An update of a global batch that weighs nothing, which all ranks know. It is counted, and trains nothing."""
        loss = self.latest[0]
        self.latest = (0.0 if loss is None else loss, None)  # for who averages the losses of updates: this one has none
        for listener in self._listeners:
            listener.end_window(updated=False)
        unit.zero_grad(state)
        window = unit.window
        if agree.is_rank0() and window.empty & (window.empty - 1) == 0:  # each time that there are twice as many
            logger.warning(
                "update %s was left out, as its global batch weighs 0: all of its samples were filtered, or all of its labels "
                "left out. Parameters and schedule stay as they are. So far that was so in %s of %s updates",
                window.updates - 1,
                window.empty,
                window.updates,
            )

    def advance(self, unit: Any) -> None:
        """After an update or an epoch, as `lr_interval` says: the schedule, or the averages' own once these have begun."""
        if unit.swa_scheduler is not None and unit.swa_model is not None and unit.swa_model.begun:
            unit.swa_scheduler.step()
        else:
            unit.step_lr_scheduler()

    # --- windows that do not come to their end

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
            logger.warning("the epoch ended in the middle of an accumulation window; its micro-batches are left out")
            self.discard(unit, state)
            state.logged.discard()
        if unit.lr_interval == "epoch":
            self.advance(unit)

    def end(self, unit: Any, *, complete: bool) -> None:
        """Training is over, or only interrupted. Collective if complete."""
        window = unit.window
        window.group = self._trains_with = None
        if complete:
            unit.prepared.end_training()
            if 0 < window.updates == window.empty:
                raise window.weightless()
            self.finite.finish(window.updates, together=self.joined)
            if unit.swa_model is not None and agree.is_rank0():
                unit.swa_model.warn_if_unused()
