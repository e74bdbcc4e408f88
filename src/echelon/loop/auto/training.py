"""The training step of an AutoUnit: a batch's way from the loop to the optimizer's step, read from top to bottom.

    train_step          the batch, or its pieces, as micro-batches with weights
    _forward_backward   loss, outputs = compute_loss(state, data)    under autocast
                        backward of the loss, weighted               no gradient traffic before the window's last micro-batch
    _update             see `updating`

`Window` says how micro-batches are weighed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from echelon.common.errors import LoopError, LossError
from echelon.data.parts import Pieces
from echelon.loop.auto.finite import check_loss
from echelon.loop.auto.loss_scale import tell_of_labels, tell_of_scale
from echelon.loop.auto.parts_check import check_parts
from echelon.loop.auto.predicting import AutoPredictUnit
from echelon.loop.auto.standing_in import explain_one_sample, standing_in, uncounted
from echelon.loop.auto.sub_batches import in_order, of_all, together
from echelon.loop.auto.updating import AutoUpdates
from echelon.loop.loss import problem_with
from echelon.loop.samples import samples_of, tell_of_doubts
from echelon.loop.state import step_under_way
from echelon.parallel.gradients import clip
from echelon.parallel.micro_batch import MicroBatch
from echelon.parallel.prepared import NO_CONTEXT
from echelon.world import clock
from echelon.world.clock import Part

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["AutoTrainUnit", "TrainStepResults"]

T = TypeVar("T")

# Marks of every step: asking the enumeration takes longer than making the mark.
FORWARD, BACKWARD = int(Part.FORWARD), int(Part.BACKWARD)


@dataclass(frozen=True)
class TrainStepResults:
    """What a training step gave.

    Args:
        loss: this rank's mean loss of the micro-batch, detached.
        total_grad_norm: before clipping, over all ranks; None if the step updated nothing or no norm was asked for.
        outputs: as `compute_loss` returned them.
    """

    loss: torch.Tensor
    total_grad_norm: torch.Tensor | None
    outputs: Any


class AutoTrainUnit(AutoPredictUnit[T], AutoUpdates[T]):
    """What AutoUnit does in a training step, and what its user writes for it. AutoUnit's constructor sets the attributes."""

    retain_graph: bool | None
    training: bool
    peak_flops: float | None = None  # FLOP/s of this device; None looks its name up
    _samples: int | None = None  # that the loader put into the batch under way, where it says so
    _told_of_doubts = False  # about the samples of a batch
    expects_mean = True  # False where a loss trains as in the library that it was written for, whatever it is
    _saw_loss = False
    _reports_step = True  # False once it is known that nobody wants to hear of its steps

    # --- what the user writes

    @abstractmethod
    def compute_loss(self, state: State, data: T) -> tuple[torch.Tensor, Any]:
        """The mean loss of a micro-batch, a scalar with a gradient, and anything that hooks should see."""

    @abstractmethod
    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        """The optimizer over the parameters of `module`, which has its final form, and a scheduler or None.

        Called once, when it is first needed, after your class's whole constructor. Adam and AdamW are fused on a GPU by default.
        """

    # --- instead, for several optimizers

    def configure_optimizers_and_lr_schedulers(
        self, module: torch.nn.Module
    ) -> Mapping[str, torch.optim.Optimizer | tuple[torch.optim.Optimizer, Any]]:
        """The optimizers by name, each over parameters of its own, or pairs of one and its scheduler or None.

        They become attributes, `optimizer_NAME` and `lr_scheduler_NAME`.
        """
        raise NotImplementedError

    def compute_losses(self, state: State, data: T) -> Generator[tuple[str | tuple[str, ...], torch.Tensor], None, Any]:
        """Yield the name of an optimizer and the mean loss that it steps on, in the order of the steps.

        Where the next loss is computed, that optimizer has stepped, in an update's last micro-batch. It trains on the gradients
        of this loss alone, over the whole global batch. One loss of several optimizers is yielded with a tuple of their names:
        as it is here, where all step on `compute_loss`. What may be returned at the end are outputs.
        """
        loss, outputs = self.compute_loss(state, data)
        yield tuple(turn.name for turn in self.several.turns) if self.several is not None else (), loss
        return outputs

    def __init_subclass__(cls, **options: Any) -> None:
        """What is written for several optimizers need not be written for one."""
        super().__init_subclass__(**options)
        if cls.configure_optimizers_and_lr_schedulers is AutoTrainUnit.configure_optimizers_and_lr_schedulers:
            return
        cls.has_several = True
        if cls.configure_optimizers_and_lr_scheduler is AutoTrainUnit.configure_optimizers_and_lr_scheduler:
            cls.configure_optimizers_and_lr_scheduler = _of_one  # type: ignore[assignment, method-assign]
        if cls.compute_loss is AutoTrainUnit.compute_loss and cls.compute_losses is not AutoTrainUnit.compute_losses:
            cls.compute_loss = _sum_of_losses  # type: ignore[assignment, method-assign]

    def weight(self, data: T) -> float | torch.Tensor:
        """What a micro-batch counts in the mean over the global batch: its samples, as many as the loader put into it, or as can
        be read in it; it is said once where that is not clear. A language model counts tokens, where their number differs:
        `return echelon.count_tokens(data, next_token=True)`.

        A number if it is known on the host; a 0-dim tensor on the device is summed up there without waiting.
        """
        samples, doubts = samples_of(data, self._samples)
        if doubts is not None and not self._told_of_doubts:
            self._told_of_doubts = True
            tell_of_doubts(type(self).__name__, data, samples, doubts, self._samples)
        share = self.prepared.share
        return samples if isinstance(share, float) and share == 1 else samples * share

    def flops(self, data: T) -> float | None:
        """FLOPs of a micro-batch, with cp of this rank's part of it, forward and backward, for `mfu` in metrics.jsonl.

        Without what is computed again. None takes the formula for a language model (`records/utilization.py`), and leaves
        `mfu` out for another and in a pipeline. Yours must tell it from shapes, as nothing here may wait for a device.
        """
        return None

    def on_train_step_end(self, state: State, data: T, step: int, results: TrainStepResults) -> None:
        """After a step; `step` counts from 0."""

    # --- a step

    def train_step(self, state: State, data: T) -> tuple[torch.Tensor, Any]:
        """One micro-batch, and an update if it ends its window. Returns the detached loss and the outputs."""
        window = self.window
        if self._finite.is_long:  # here: callbacks such as RollBack have seen the update before, and may have gone back
            self._finite.raise_if_long(together=self._reduces)
        if self._trains_with and self._trains_with[0] is not self.optimizer and window.count == 0:
            self._check_optimizer()  # another was assigned, on all ranks alike
        step = step_under_way(state.train_state)
        self.has_updated = ends_window = window.open(step.is_last)
        self._samples = step.samples
        if self.prepared.doubts_parts:
            check_parts(self, state, in_order(data, step.is_padding, None)[0][0] if isinstance(data, Pieces) else data)
        micro_batches = self._micro_batches(data, padded=step.is_padding, ends_window=ends_window)
        if window.reference is None:
            window.estimate(0 if self.prepared.is_replica else sum(m.weight for m in micro_batches), over_ranks=self._reduces)
        if state.recorder is not None and state.recorder.counts_flops:
            state.recorder.count_flops(self, micro_batches)
        if self.zero_grad_at_train_step_start and window.count == 1:
            self.zero_grad(state)
        if self.prepared.takes_windows:
            return self._take_into_window(state, micro_batches, ends_window)
        if window.count == 1 and (around := self.prepared.window()) is not NO_CONTEXT:
            self._enter_window(around)
        losses, made = [], []
        try:
            for micro_batch in micro_batches:
                if clock.running is not None:
                    clock.running.enter(FORWARD)
                if micro_batch.is_padding:
                    with standing_in(self):
                        made.append(self._forward_backward(state, micro_batch))
                else:
                    made.append(self._forward_backward(state, micro_batch))
                losses.append(window.latest_loss)
        except BaseException as error:
            self._exit_window()
            explain_one_sample(error)
            raise
        loss = losses[0] if len(losses) == 1 else together(losses, micro_batches)
        outputs = made[0] if len(made) == 1 else of_all(made, micro_batches)
        if ends_window and self._around_window is not None:
            self._exit_window()
        norm = self._update(state) if ends_window else None
        if self._reports_step:
            clock.enter(Part.OTHER)
            number = self.train_progress.num_steps_completed
            batch = of_all([each.data for each in micro_batches], micro_batches)
            self.on_train_step_end(state, batch, number, TrainStepResults(loss, norm, outputs))
        return loss, outputs

    @abstractmethod
    def _check_optimizer(self) -> None:
        """Look at the optimizer before it steps. Collective."""

    def _take_into_window(self, state: State, micro_batches: list[MicroBatch[T]], ends_window: bool) -> tuple[Any, Any]:
        """A step under a layout that computes the micro-batches of an update at once: (None, None) before the window's last.

        `on_train_step_end` is called for all steps of the window then, in their order.
        """
        self._held.append(micro_batches)
        if not ends_window:
            return None, None
        steps, self._held = self._held, []
        every = [micro_batch for step in steps for micro_batch in step]
        with self.prepared.window():
            forward = partial(self.through_stages, state, partial(self._forward_in_stages, state))
            clock.enter(Part.STEP)  # in any order
            made = iter(self.prepared.forward_backward_window(every, forward, partial(self._backward, state)))
        if self._reduces:
            self.window.start_reduction(state.stop_requested, state.logged.signature())
        results: list[tuple[list[MicroBatch[T]], Any, Any]] = []
        for step in steps:
            of_step = [next(made) for _ in step]
            outputs = of_all([each for _, each in of_step], step)
            results.append((step, together([loss.detach() for loss, _ in of_step], step), outputs))
        norm, number = self._update(state), self.train_progress.num_steps_completed
        for back, (step, loss, outputs) in zip(reversed(range(len(results))), results, strict=True):
            if self._reports_step:
                state.logged.weight = 0 if self.prepared.is_replica else step[-1].weight
                found = TrainStepResults(loss, None if back else norm, outputs)
                self.on_train_step_end(state, of_all([each.data for each in step], step), number - back, found)
        return results[-1][1:]

    def _micro_batches(self, data: Any, *, padded: bool, ends_window: bool) -> list[MicroBatch[T]]:
        """A batch as one, or its pieces, of which only the last may end the window."""
        if not isinstance(data, Pieces):
            return [self._micro_batch(data, padded, ends_window)]
        made: list[MicroBatch[T]] = []
        samples = self._samples
        for piece, is_padding, in_piece in (pieces := in_order(data, padded, samples)):
            self._samples = in_piece
            made.append(self._micro_batch(piece, is_padding, ends_window and len(made) == len(pieces) - 1))
        self._samples = samples
        return made

    def _micro_batch(self, whole: Any, is_padding: bool, is_last: bool) -> MicroBatch[T]:
        piece = self.prepared.part_of(whole)
        weight = 0 if is_padding else self.weight(piece)
        if isinstance(weight, torch.Tensor):
            # Whole numbers in float32 end at 16 million; waiting for a CPU costs nothing.
            weight = float(weight) if weight.device.type == "cpu" else weight.double()
        return MicroBatch(piece, weight, is_last, is_padding)

    def _forward_backward(self, state: State, micro_batch: MicroBatch[T]) -> Any:
        """With the window's last, gradients are summed up over the ranks. Returns the outputs."""
        prepared, bitwise, last, anomaly = self.prepared, self._bitwise, micro_batch.is_last, self.detect_anomaly
        if self.several is not None:
            if self._routers is not None:
                self._routers.begin_forward(micro_batch.weight)
            with prepared.explaining(), prepared.accumulate(last), torch.autograd.set_detect_anomaly(bool(anomaly)):
                return self.several.train(state, micro_batch)
        if bitwise is not None:
            bitwise.begin(self.window.updates, self.window.count - 1)
        forward, backward = partial(self._forward, state), partial(self._backward, state)
        around = prepared.accumulate(last or bitwise is not None)
        if around is NO_CONTEXT and anomaly is None:  # which costs more than all else here
            _, outputs = prepared.forward_backward(micro_batch, forward, backward)
        else:
            with around, NO_CONTEXT if anomaly is None else torch.autograd.set_detect_anomaly(anomaly):
                _, outputs = prepared.forward_backward(micro_batch, forward, backward)
        if bitwise is not None:
            bitwise.add(last=last)
        return outputs

    def _forward_in_stages(self, state: State, micro_batch: MicroBatch[T]) -> tuple[torch.Tensor, Any]:
        if not micro_batch.is_padding:
            return self._forward(state, micro_batch)
        with uncounted(self):
            return self._forward(state, micro_batch)

    def _forward(self, state: State, micro_batch: MicroBatch[T]) -> tuple[torch.Tensor, Any]:
        if self._routers is not None:
            self._routers.begin_forward(micro_batch.weight)
        state.logged.begins(0 if self.prepared.is_replica else micro_batch.weight)
        if self.computes.dtype is None:
            made = self.compute_loss(state, micro_batch.data)
        else:
            with self.autocast():
                made = self.compute_loss(state, micro_batch.data)
        is_pair = type(made) is tuple and len(made) == 2 and isinstance(made[0], torch.Tensor)
        is_usual = is_pair and not made[0].dim() and made[0].requires_grad
        if not is_usual and (problem := problem_with(made, self.module)) is not None:
            raise LossError(f"{type(self).__name__}.compute_loss returned {problem}")
        if self.detect_anomaly:
            check_loss(made[0], micro_batch.weight, self.train_progress.num_updates_completed)
        return made

    @property
    def divided(self) -> int:
        """Into how many micro-batches a batch is divided that was one loss's before."""
        size = self.data_rank_and_size
        return (1 if size is None else size[1]) * self.window.size

    def _look_at(self, loss: torch.Tensor, micro_batch: MicroBatch[T]) -> None:
        if self.expects_mean and self.divided > 1:
            samples = samples_of(micro_batch.data, self._samples)[0]
            tell_of_scale(loss, samples, self.window.size, self.divided)
            if type(micro_batch.weight) in (int, float) and micro_batch.weight == samples:
                tell_of_labels(loss, samples)

    def _backward(self, state: State, loss: torch.Tensor, micro_batch: MicroBatch[T]) -> None:
        window, prepared, weight = self.window, self.prepared, micro_batch.weight
        if not self._saw_loss:
            self._saw_loss = True
            self._look_at(loss, micro_batch)
        window.add(loss.detach(), 0 if prepared.is_replica else weight)
        if micro_batch.is_last and self._reduces and not prepared.takes_windows:  # whose last backward pass may be another
            window.start_reduction(state.stop_requested, state.logged.signature())
        if clock.running is not None and not prepared.takes_windows:
            clock.running.enter(BACKWARD)
        assert window.reference is not None
        scale = weight * prepared.averaged_over / window.reference
        loss = loss if self.grad_scaler is None else self.grad_scaler.scale(loss)
        if prepared.takes_windows and not loss.requires_grad:  # of another stage: it only counts
            return
        if isinstance(scale, float) and scale == 1.0:
            loss.backward(retain_graph=self.retain_graph)
        else:
            if isinstance(scale, torch.Tensor):
                clip.pass_zeros(loss, scale == 0)
            elif scale == 0:
                clip.pass_zeros(loss)
            # As the first gradient of the chain rule: the weight costs no operation of its own. It is filled in on the device:
            # a copy from the host, as `new_tensor` makes it, would wait for all kernels before.
            start = scale.to(loss) if isinstance(scale, torch.Tensor) else loss.new_full((), scale)
            loss.backward(gradient=start.reshape(()), retain_graph=self.retain_graph)


def _of_one(unit: Any, module: torch.nn.Module) -> Any:
    raise LoopError(f"{type(unit).__name__} has several optimizers, which configure_optimizers_and_lr_schedulers gives.")


def _sum_of_losses(unit: Any, state: State, data: Any) -> tuple[torch.Tensor, Any]:
    """In evaluations, where nothing steps in between."""
    unit.configure()
    losses = []
    for names, loss in unit.compute_losses(state, data):
        unit.several.log(state, unit.several.named(names), loss)
        losses.append(loss)
    return torch.stack(losses).sum(), None
