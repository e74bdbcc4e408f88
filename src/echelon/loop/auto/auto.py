"""AutoUnit: the user writes the loss and the optimizer; precision, accumulation, clipping and parallelism are values.

This file has the methods that a user writes, the training step, the evaluation, and what happens as phases begin and end.
`loop/auto/optimized_unit.py` builds the unit and is shared with the user's own loops; `loop/auto/update.py` leads from a loss to
the optimizer's step.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from echelon.common.errors import LoopError
from echelon.loop.auto.averaged import SWAParams
from echelon.loop.auto.optimized_unit import OptimizedUnit
from echelon.loop.auto.prepared_unit import AutoPredictUnit
from echelon.loop.auto.several import of_one, sum_of_losses
from echelon.loop.auto.uncounted import check_parts, standing_in, uncounted
from echelon.loop.auto.unit_options import AutoOptions, UnitOptions, options_from
from echelon.loop.records import monitored
from echelon.loop.records.metrics import Mean
from echelon.loop.samples import summable
from echelon.loop.state import EntryPoint, step_under_way
from echelon.loop.unit import EvalUnit, TestUnit, TrainUnit
from echelon.loop.validate import keeps
from echelon.parallel.guards.guard import explain
from echelon.parallel.prepared import NO_CONTEXT, MicroBatch, combined
from echelon.parallel.recipe.activation import Preset
from echelon.parallel.recipe.compilation import Compile
from echelon.parallel.recipe.float8 import Float8
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.strategy import Strategy
from echelon.world import clock
from echelon.world.clock import Part

if TYPE_CHECKING:
    from echelon.loop.state import PhaseState, State

__all__ = ["AutoUnit", "TrainStepResults"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class TrainStepResults:
    """Results of a training step.

    Args:
        loss: this rank's mean loss of the micro-batch, detached.
        total_grad_norm: norm before clipping, over all ranks; None if the step made no update or no norm was asked for.
        outputs: as `compute_loss` returned them.
    """

    loss: torch.Tensor
    total_grad_norm: torch.Tensor | None
    outputs: Any


class AutoUnit(OptimizedUnit, AutoPredictUnit[T], TrainUnit[T], EvalUnit[T], TestUnit[T]):
    """Training, evaluation, prediction and testing of one module.

    Write `compute_loss(state, data) -> (loss, outputs)`, with a *mean* loss, and
    `configure_optimizers_and_lr_scheduler(module) -> (optimizer, scheduler or None)`. For several optimizers, such as a GAN's,
    write `compute_losses(state, data)`, which yields an optimizer's name with its loss, one pair after the other, and
    `configure_optimizers_and_lr_schedulers(module) -> {name: (optimizer, scheduler or None)}`. The module may hold several
    networks.

    Args:
        module: the model; `self.module` is what the layout made of it.
        layout: how the model is distributed over the ranks: "ddp", "fsdp", "tp=2", or a Strategy; None for a module that is
            wrapped already or stays as it is.
        precision: "fp32", "bf16", "fp16" (with a gradient scaler), "float8" (torchao), a torch dtype, or a Precision or Float8.
            Parameters, their gradients and optimizer state stay float32; a sharded layout gathers parameters in this type.
        accumulate: micro-batches per update on each rank. A Loader splits its global batch into that many; with another loader,
            that many batches make an update. A short last micro-batch keeps its full weight. None is 1, or the loader's number.
        clip_grad_norm: largest norm of the whole model's gradient; inf measures the norm without clipping.
        compile: "blocks" compiles the repeated blocks one by one, True the whole module; or a TorchCompileParams.
        recompute: "blocks", "selective" or an ActivationCheckpointParams: recompute activations instead of keeping them.
        ema: decay of an exponential moving average of the weights, such as 0.999, or a SWAParams. Evaluations, tests and
            predictions use the average; `swa_model` is the module with averaged weights. The average is saved with the unit.
        options: options that few units need: device, schedule by epochs, clipping by value, ...
        older: older names of these arguments, which are translated with a warning.
    """

    unsaved = ("_evaluation",)  # complete before a checkpoint is saved
    own_schedule = True  # the unit may override step_lr_scheduler; the start of training finds out
    _reports_step = True  # False once on_train_step_end is known not to be overridden
    built_attributes: frozenset[str]  # what `build_from` makes; each process makes its own

    def __init__(
        self,
        *,
        module: nn.Module,
        layout: Strategy | str | None = None,
        precision: str | torch.dtype | Precision | Float8 | None = None,
        accumulate: int | None = None,
        clip_grad_norm: float | None = None,
        compile: Compile = None,
        recompute: Preset = None,
        ema: float | SWAParams | None = None,
        options: UnitOptions | None = None,
        **older: Any,
    ) -> None:
        own: dict[str, Any] = {"layout": layout, "precision": precision, "accumulate": accumulate}
        own |= {"clip_grad_norm": clip_grad_norm, "compile": compile, "recompute": recompute, "ema": ema}
        super(AutoPredictUnit, self).__init__()  # makes the progress of each phase
        self.build_from(module, options_from("AutoUnit", options, older, **own))

    def build_from(self, module: nn.Module, options: AutoOptions) -> None:
        before = set(vars(self))
        super().build_from(module, options)
        # Set if the current window is unfit to go on: after an error in a micro-batch, which may have left gradients, or after a
        # restore. That many of its micro-batches were counted, and are computed again when training begins anew.
        self._lost: int | None = None
        self._held: list[MicroBatch[T]] = []  # micro-batches of the current window, if the layout runs a window at once
        self.eval_loss = self.test_loss = math.nan  # of the latest evaluation and test, over all ranks
        self.has_eval_loss = False  # whether the latest evaluation counted a loss
        self._evaluation = Mean()
        if "built_attributes" not in vars(self):
            self.built_attributes = frozenset(vars(self).keys() - before)

    # --- what the user writes; the optimizers and `weight` are in OptimizedUnit

    @abstractmethod
    def compute_loss(self, state: State, data: T) -> tuple[torch.Tensor, Any]:
        """Return the mean loss of a micro-batch, a scalar that requires grad, and anything that hooks should see."""

    # --- in place of compute_loss, for several optimizers

    def compute_losses(self, state: State, data: T) -> Generator[tuple[str | tuple[str, ...], torch.Tensor], None, Any]:
        """Yield an optimizer's name and the mean loss that it steps on, in the order of the steps.

        In an update's last micro-batch the optimizer steps before the generator goes on to the next loss. It trains on the
        gradients of this loss alone, over the whole global batch. If several optimizers share one loss, yield it with a tuple
        of their names; this default yields `compute_loss` for all of them. The generator may return outputs.
        """
        loss, outputs = self.compute_loss(state, data)
        yield tuple(turn.name for turn in self.several.turns) if self.several is not None else (), loss
        return outputs

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that defines the methods for several optimizers need not define those for one."""
        super().__init_subclass__(**options)
        if cls.configure_optimizers_and_lr_schedulers is AutoUnit.configure_optimizers_and_lr_schedulers:
            return
        cls.has_several = True
        if cls.configure_optimizers_and_lr_scheduler is AutoUnit.configure_optimizers_and_lr_scheduler:
            cls.configure_optimizers_and_lr_scheduler = of_one  # type: ignore[assignment, method-assign]
        if cls.compute_loss is AutoUnit.compute_loss and cls.compute_losses is not AutoUnit.compute_losses:
            cls.compute_loss = sum_of_losses  # type: ignore[assignment, method-assign]

    def on_train_step_end(self, state: State, data: T, step: int, results: TrainStepResults) -> None:
        """Called after a training step; `step` counts from 0."""

    def has_own_schedule(self) -> bool:
        return not keeps(self, "step_lr_scheduler", AutoUnit)

    def step_lr_scheduler(self) -> None:
        """Advance the scheduler by one interval; override this for a scheduler that needs a metric.

        A ReduceLROnPlateau advances after each evaluation within `fit` instead, with `eval_loss`.
        """
        if self.several is not None:
            self.several.advance(after_epoch=self.lr_interval == "epoch")
        elif self.lr_scheduler is not None and not self._plateau:
            self.lr_scheduler.step()

    # --- a training step

    def train_step(self, state: State, data: T) -> tuple[torch.Tensor, Any]:
        """Run one micro-batch, and the update if it is the window's last. Returns the detached loss and the outputs."""
        update, window = self._update, self.window
        step = update.begin_step(self, state)
        self.has_updated = ends_window = update.is_last
        if self.prepared.batches.doubts:
            check_parts(self, state, data)
        part = self.prepared.batches.part_of(data)
        weight = 0 if step.is_padding else self.weight(part)
        weight = summable(weight) if isinstance(weight, torch.Tensor) else weight
        micro_batch = MicroBatch(part, weight, ends_window, step.is_padding, step.samples)
        if window.reference is None:
            update.estimate(self, state, micro_batch)
        if self.zero_grad_at_train_step_start and window.count == 1:
            self.zero_grad(state)
        if self.prepared.trains == "scheduled":
            return self._take_into_window(state, micro_batch)
        try:
            with update.passes(self, state, micro_batch):
                if self.several is not None:
                    outputs = self.several.train(state, micro_batch)
                else:
                    loss, outputs = update.forward(self, state, micro_batch)
                    update.backward(self, state, loss, micro_batch, retain_graph=self.retain_graph)
        except BaseException as error:
            self._lost = window.count - 1
            explain(self.prepared.guards, error)
            raise
        detached = window.latest_loss
        norm = update.complete(self, state) if ends_window else None
        if self._reports_step:
            clock.enter(Part.OTHER)
            results = TrainStepResults(detached, norm, outputs)
            self.on_train_step_end(state, part, self.train_progress.num_steps_completed, results)
        return detached, outputs

    def _take_into_window(self, state: State, micro_batch: MicroBatch[T]) -> tuple[Any, Any]:
        """Hold a micro-batch for a layout that runs a whole window at once. Returns (None, None) before the window's last.

        The window's last micro-batch runs them all; `on_train_step_end` is then called for each, in order.
        """
        self._held.append(micro_batch)
        if not micro_batch.is_last:
            return None, None
        steps, self._held = self._held, []
        ago = {id(each): back for back, each in enumerate(reversed(steps))}
        forward = partial(self.through_stages, state, partial(self._forward_in_stages, state, ago))
        self._lost = self.window.count - 1
        made = self._update.run_window(self, state, steps, forward, outputs=self._reports_step)
        self._lost = None
        norm, number = self._update.complete(self, state), self.train_progress.num_steps_completed
        for back, step, (loss, outputs) in zip(reversed(range(len(steps))), steps, made, strict=True):
            loss = loss.detach()
            if self._reports_step:
                self.has_updated = not back  # for the hook, as it stands where micro-batches run one by one
                state.logged.weight = 0 if self.prepared.data.is_replica else step.weight
                step_results = TrainStepResults(loss, None if back else norm, outputs)
                self.on_train_step_end(state, step.data, number - back, step_results)
        return loss, outputs

    def _forward_in_stages(self, state: State, ago: dict[int, int], micro_batch: MicroBatch[T]) -> tuple[torch.Tensor, Any]:
        """Run the forward pass of a micro-batch under a layout that runs a whole window at once.

        Args:
            ago: for each micro-batch of the update, by `id`, how many steps before the current one it came.
        """
        self._update.begin_forward(self, state, micro_batch)
        with self.train_progress.at_earlier_step(ago[id(micro_batch)]), uncounted(self) if micro_batch.is_padding else NO_CONTEXT:
            return self._update.forward(self, state, micro_batch)

    # --- evaluations and tests

    def eval_step(self, state: State, data: T) -> tuple[torch.Tensor, Any]:
        """Compute the loss of a batch and add it to `eval_loss`, by its weight."""
        data, loss, outputs, counts = self._evaluate(state, data, state.eval_state)
        if counts:
            step = (self.train_progress if state.entry_point is EntryPoint.FIT else self.eval_progress).num_steps_completed
            self.on_eval_step_end(state, data, step, loss, outputs)
        return loss, outputs

    def test_step(self, state: State, data: T) -> tuple[torch.Tensor, Any]:
        """Like `eval_step`, for `test_loss`."""
        data, loss, outputs, counts = self._evaluate(state, data, state.test_state)
        if counts:
            self.on_test_step_end(state, data, self.test_progress.num_steps_completed, loss, outputs)
        return loss, outputs

    def _evaluate(self, state: State, batch: T, phase: PhaseState | None) -> tuple[T, torch.Tensor, Any, bool]:
        """Return this rank's part of the batch, its loss and outputs, and whether the batch counts: padding does not."""
        if self.prepared.batches.doubts:
            check_parts(self, state, batch)
        data = self.prepared.batches.part_of(batch)
        counts = not step_under_way(phase).is_padding
        self.samples_given = step_under_way(phase).samples
        weight = self.weight(data) if counts and not self.prepared.data.is_replica else 0
        compute = partial(self._compute, state, weight)
        if self.prepared.trains == "scheduled":
            compute = partial(self.through_stages, state, compute)
        with self.autocast(), NO_CONTEXT if counts else standing_in(self):
            loss, outputs = self.prepared.forward(data, compute)
        if counts:
            self._evaluation.update(loss, weight)
        return data, loss, outputs, counts

    def _compute(self, state: State, weight: Any, data: T) -> tuple[torch.Tensor, Any]:
        state.logged.begins(weight, str(state.active_phase))
        made: tuple[torch.Tensor, Any] = self.compute_loss(state, data)
        return made

    def on_eval_step_end(self, state: State, data: T, step: int, loss: torch.Tensor, outputs: Any) -> None:
        """Called after an evaluation step; within `fit`, `step` is the number of training steps so far."""

    def on_test_step_end(self, state: State, data: T, step: int, loss: torch.Tensor, outputs: Any) -> None:
        """Called after a test step."""

    # --- what the loops call

    @property
    def agrees_to_stop(self) -> bool:
        own_hook = self._reports_step and self.may_stop
        agrees = self._update.joined or self.prepared.trains == "alone"
        return agrees and not own_hook and keeps(self, "train_step", AutoUnit)

    @property
    def steps_by_itself(self) -> bool:
        return not keeps(self, "train_step", AutoUnit)

    def phase_started(self, state: State, phase: str) -> None:
        super().phase_started(state, phase)
        if phase == "train":
            return
        self.prepared.before_evaluation()
        if phase != "predict":
            self._evaluation.reset()
            setattr(self, f"{phase}_loss", math.nan)

    def _begin_training(self, state: State) -> None:
        if self._lost is not None:
            self.train_progress.take_back(self._lost)
            self._update.discard(self, state)
            self._held.clear()
            self._lost = None
        super()._begin_training(state)
        self._reports_step = not keeps(self, "on_train_step_end", AutoUnit)  # asked here: it may have been set on the instance
        self.own_schedule = self.has_own_schedule()
        # Within a window, an error between micro-batches has ended the run before: these go on counting.
        if self.several is None and not self.zero_grad_at_train_step_start and self.window.count == 0:
            self._update.put_left_aside(self.optimizer)
        if self._plateau and state.eval_state is None:
            raise _no_metric("this run has no evaluations: give train(..., eval=loader)")

    def may_divide_batches(self) -> bool:
        own = ("train_step", "get_next_train_batch")
        # With several optimizers, a loss is computed after the steps of the losses before it.
        return not self.has_several and all(keeps(self, name, AutoUnit) for name in own)

    def epoch_closed(self, state: State, phase: str) -> None:
        super().epoch_closed(state, phase)
        for guard in self.prepared.guards if phase != "train" else ():
            guard.evaluated()
        if phase == "train":
            self._held.clear()
        elif phase == "eval":
            loss = self._evaluation.compute()
            self.has_eval_loss = not self._evaluation.is_empty
            self.eval_loss = loss if self.has_eval_loss else self.eval_loss  # an eval_step of the user's may have set it
            self.eval_progress.latest_loss = loss if math.isfinite(loss) else None
            if self._plateau and self._options.lr_monitor is None and state.train_state is not None:
                if not self.has_eval_loss:
                    own = f"{type(self).__name__}.eval_step must call super().eval_step(state, data)"
                    raise _no_metric(f"this one counted no loss: {own}, on batches that are not empty")
                self.lr_scheduler.step(loss)
            if state.recorder is not None and self.has_eval_loss:
                state.recorder.numbers(self.train_progress.num_updates_completed, {"eval_loss": loss})
        elif phase == "test":
            loss = self._evaluation.compute()
            self.test_loss = self.test_loss if self._evaluation.is_empty else loss

    def numbers_settled(self, state: State, phase: str) -> None:
        name = self._options.lr_monitor
        if phase == "eval" and self._plateau and name is not None and state.train_state is not None:
            try:
                value, _ = monitored.number(name, state, self, "eval")
            except monitored.Unknown as error:
                raise LoopError(f"lr_monitor must be the name of a logged number, got {name!r}: {error}.") from None
            self.lr_scheduler.step(value)

    def evaluating(self) -> AbstractContextManager[Any]:
        averages = self.swa_model
        applied = averages.applied() if averages is not None and averages.params.use_in_evaluation else NO_CONTEXT
        return combined(applied, *(guard.evaluating() for guard in self.prepared.guards))

    def restored(self) -> None:
        super().restored()
        if self.window.count:
            self._lost = 0
        if self.eval_progress.latest_loss is not None:
            self.eval_loss = self.eval_progress.latest_loss


def _no_metric(why: str) -> LoopError:
    """The refusal of a ReduceLROnPlateau that has no metric."""
    return LoopError(
        f"ReduceLROnPlateau needs the loss of each evaluation, but {why}. Or override step_lr_scheduler and call "
        "self.lr_scheduler.step(metric) there."
    )
