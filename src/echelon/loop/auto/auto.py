"""AutoUnit: the user writes the loss and the optimizer; precision, accumulation, clipping and parallelism are values.

`training` has the training step. Here is how a unit is built, what it does as phases begin and end, and its evaluation.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from echelon.common.errors import LoopError
from echelon.contracts.overrides import overrides
from echelon.data.base import BaseLoader, loaders_of
from echelon.loop.auto.averaged import AveragedWeights, SWAParams, swa_scheduler
from echelon.loop.auto.bitwise import BitEqual
from echelon.loop.auto.evaluating import AutoEvalUnit
from echelon.loop.auto.finite import FiniteWatch
from echelon.loop.auto.optimizer_checks import check_holds, look_at_first_update, not_the_modules, when_it_grows
from echelon.loop.auto.option_checks import (
    check_evaluated,
    check_made,
    check_own_names,
    check_plateau,
    check_trainable,
    tell_of_interval,
)
from echelon.loop.auto.predicting import AutoPredictUnit
from echelon.loop.auto.several import configured
from echelon.loop.auto.sub_batches import pieces_for
from echelon.loop.auto.training import AutoTrainUnit, TrainStepResults
from echelon.loop.auto.unit_options import AutoOptions, BuiltAtFirstUse, UnitOptions, options_from
from echelon.loop.records import monitored
from echelon.loop.records.metrics import MeanOfAPhase
from echelon.loop.window import Window
from echelon.parallel.experts.loads import Routers, routers_of
from echelon.parallel.gradients.fused import fuse
from echelon.parallel.prepared import NO_CONTEXT
from echelon.parallel.recipe.activation import Preset
from echelon.parallel.recipe.float8 import Float8
from echelon.parallel.recipe.precision import Precision, Shards, check_scaler
from echelon.parallel.recipe.recipe import Compile
from echelon.parallel.strategy import Strategy
from echelon.world import agree, rng

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["AutoUnit", "TrainStepResults"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AutoUnit(AutoTrainUnit[T], AutoEvalUnit[T]):
    """Training, evaluation, prediction and testing of one module.

    Write `compute_loss(state, data) -> (loss, outputs)`, with a *mean* loss, and
    `configure_optimizers_and_lr_scheduler(module) -> (optimizer, scheduler or None)`. For several optimizers, as of a GAN, write
    `compute_losses(state, data)`, which yields the name of one and its loss in turn, and
    `configure_optimizers_and_lr_schedulers(module) -> {name: (optimizer, scheduler or None)}`; the module may hold several.

    Args:
        module: the model; `self.module` is what the layout made of it.
        layout: how it lies on the ranks: "ddp", "fsdp", "tp=2", or a Strategy; None for a module that is wrapped already or stays
            as it is.
        precision: "fp32", "bf16", "fp16" (with a gradient scaler), "float8" (torchao), a torch dtype, or a Precision or Float8.
            Parameters, their gradients and optimizer state stay float32; a sharded layout gathers parameters in this type.
        accumulate: micro-batches per update on each rank. A Loader splits its global batch into as many; of other loaders as many
            batches make an update. A short last one keeps its full weight. None is 1, or what the loader was told.
        clip_grad_norm: largest norm of the whole model's gradient; inf only measures it.
        compile: "blocks" compiles the repeated blocks one by one, True the whole module; or a TorchCompileParams.
        recompute: "blocks", "selective" or an ActivationCheckpointParams: recompute activations instead of keeping them.
        ema: keep an exponential moving average of the weights with this decay, such as 0.999, and evaluate, test and predict
            with it; `swa_model` is the module with it. It is saved with the unit. Or a SWAParams.
        options: what few units need: device, schedule by epochs, clipping by value, ...
        older: older names of these arguments, which are translated with a warning.
    """

    # What `weight` counts; names the throughput in metrics.jsonl: "<weight_unit>_per_s".
    weight_unit = "samples"
    # With deterministic="bitwise": micro-batches of a global batch over all ranks, a power of two that the ranks divide.
    bitwise_parts = 4

    optimizer: torch.optim.Optimizer = BuiltAtFirstUse()  # type: ignore[assignment]
    lr_scheduler: Any = BuiltAtFirstUse()
    may_lack = ("grad_scaler", "_bitwise")

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
        chosen = options_from(
            "AutoUnit",
            options,
            older,
            layout=layout,
            precision=precision,
            accumulate=accumulate,
            clip_grad_norm=clip_grad_norm,
            compile=compile,
            recompute=recompute,
            ema=ema,
        )
        super(AutoPredictUnit, self).__init__()  # those of all phases: their progress
        self.build_from(module, chosen)

    # --- how it is built, here or once more in another process

    def build_from(self, module: nn.Module, options: AutoOptions) -> None:
        """Make the module parallel, and all that belongs to it (`rebuild.BUILT`). Collective. Progress stays as it is."""
        self._prepare(module, options)
        self._options = options
        self.training, self.lr_interval = options.training, options.lr_interval
        parts = overrides().parts or (self.bitwise_parts if options.deterministic == "bitwise" else None)
        self._bitwise = BitEqual(parts, self.prepared) if parts and self.training else None
        said = self._bitwise.accumulation if self._bitwise is not None else overrides().accumulation
        said = said or options.accumulate
        self._takes_loaders = said is None
        self.gradient_accumulation_steps = steps = said or 1
        self.window = Window(steps, fixed=self._bitwise is not None)
        groups = [*self.prepared.data_groups, *self.prepared.stages]
        self._routers = Routers.of(self.prepared.unwrapped, groups) if routers_of(self.prepared.unwrapped) else None
        self.clip_grad_norm, self.clip_grad_value = options.clip_grad_norm, options.clip_grad_value
        self.retain_graph = options.retain_graph
        self.zero_grad_at_train_step_start = options.zero_grad_first
        self.grad_scaler = self.computes.scaler(self.device, self.prepared) if self.training else None
        self.swa_params = averaged = options.averaging
        self.swa_model = AveragedWeights(self.prepared, averaged) if averaged is not None and self.training else None
        self.swa_scheduler = self._shards = self._first_look = None
        self._plateau = self._reduces = False
        self._pieces_of_step = 1
        self._finite = FiniteWatch(options.stop_after_nonfinite_losses)
        self.latest_update = (None, None)
        self.eval_loss = self.test_loss = math.nan  # of the latest evaluation and test, over all ranks
        self.has_eval_loss = False  # whether the latest evaluation counted any
        self._around_window, self._held, self._trains_with = None, [], []
        self._evaluation = MeanOfAPhase()

    @property
    def auto_options(self) -> AutoOptions:
        """What `build_from` was given, as it is now: `unit.clip_grad_norm = 1.0` counts."""
        return replace(
            self._options,
            lr_interval=self.lr_interval,
            precision=self.computes,
            accumulate=None if self._takes_loaders else self.gradient_accumulation_steps,
            detect_anomaly=self.detect_anomaly,
            clip_grad_norm=self.clip_grad_norm,
            clip_grad_value=self.clip_grad_value,
            averaging=self.swa_params,
            training=self.training,
            prefetch=self.enable_prefetch,
            zero_grad_first=self.zero_grad_at_train_step_start,
        )

    @property
    def step_lr_interval(self) -> str:
        """`lr_interval` in TorchTNT's words."""
        return "epoch" if self.lr_interval == "epoch" else "step"

    @step_lr_interval.setter
    def step_lr_interval(self, interval: str) -> None:
        self.lr_interval = "epoch" if interval == "epoch" else "update"

    def configure(self) -> None:
        """Build optimizer and scheduler if they are not built yet."""
        if not self.training or self.several is not None or self.__dict__.get("optimizer") is not None:
            return  # None is what TorchTNT scripts may have set
        if self.has_several:
            self.several = configured(self, own_schedule=_overrides(self, AutoUnit, "step_lr_scheduler"))
            return
        made = self.prepared.optimizer(self.configure_optimizers_and_lr_scheduler)
        check_made(type(self).__name__, made)
        check_holds(self, made[0])
        fuse(made[0])
        self.optimizer, self.lr_scheduler = made
        plateau = isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._plateau = plateau and not _overrides(self, AutoUnit, "step_lr_scheduler")
        if self.swa_params is not None and self.swa_params.swalr_params is not None:
            self.swa_scheduler = swa_scheduler(self.optimizer, self.swa_params.swalr_params)

    # --- what the loops call

    def app_state(self) -> dict[str, Any]:
        self.configure()
        return super().app_state()

    @property
    def at_boundary(self) -> bool:
        return self.window.count == 0

    def steps_until(self, updates: int) -> int:
        return max(0, updates * self.window.size - self.window.count)

    @property
    def agrees_to_stop(self) -> bool:
        own_hook = self._reports_step and self.may_stop
        return (self._reduces or self.prepared.works_alone) and not own_hook and not _overrides(self, AutoUnit, "train_step")

    @property
    def steps_by_itself(self) -> bool:
        return _overrides(self, AutoUnit, "train_step")

    @property
    def agrees_on_updates(self) -> bool:
        """Whether `latest_update` is the same on all ranks."""
        return self._reduces

    def phase_started(self, state: State, phase: str) -> None:
        check_own_names(self)
        if phase == "train":
            self._begin_training(state)
            return
        self.prepared.before_evaluation()
        if phase != "predict":
            self._evaluation.mean.reset()
        if phase == "eval":
            self.eval_loss = math.nan
        elif phase == "test":
            self.test_loss = math.nan

    def _begin_training(self, state: State) -> None:
        together = self.prepared.averaged_over > 1 or self.prepared.forward_is_collective
        self._reduces = agree.is_joined() and together
        self.window.group = agree.control_group() if self._reduces else None
        self.window.may_be_empty = self.prepared.works_alone
        self.window.guards = () if self.has_several else self.prepared.guards  # those of several steps have other passes
        if self._reduces:
            self.prepared.compare_calls()
        has_layout = self._options.layout is not None
        check_trainable(self, together=self._reduces or not agree.is_joined(), has_layout=has_layout)
        self.configure()
        self._reports_step = _overrides(self, AutoUnit, "on_train_step_end")  # by now also one set on the unit itself
        self.prepared.wants_outputs = self._reports_step
        self._own_schedule = _overrides(self, AutoUnit, "step_lr_scheduler")
        self._check_optimizer()
        if self._finite.is_long:  # of an earlier call; the caller has caught it
            self._finite.forget()
        if self._plateau:
            check_plateau(state)
        elif self.window.updates == 0 and agree.is_rank0() and not self._own_schedule:
            tell_of_interval(self.lr_scheduler, self.lr_interval)
        check_scaler(self.grad_scaler, self.computes, self.prepared)
        if self.grad_scaler is not None:
            self._shards = Shards(self.optimizer, self.module.parameters())
        loader: Any = getattr(state.train_state, "dataloader", None)
        if self._bitwise is None:
            own = ("train_step", "get_next_train_batch")
            own_step = self.has_several or any(_overrides(self, AutoUnit, name) for name in own)  # a loss meets steps before it
            self._pieces_of_step = pieces_for(loader, own_step)
            rng.separate(self.prepared.dp_rank)  # of bit-equal training, streams belong to samples and not to ranks
        self.window.size = self.settle_accumulation(loader)
        self.window.rescale(self.train_progress)

    def settle_accumulation(self, loader: Any) -> int:
        """Agree with a training loader on the micro-batches of an update, before anything counts them.

        Raises:
            UsageError: both were told, and not the same.
        """
        for part in loaders_of(loader):
            if isinstance(part, BaseLoader) and self._bitwise is not None:
                part.split(self._bitwise.accumulation, shares=self._bitwise.parts)
            elif isinstance(part, BaseLoader):
                part.take_accumulation(None if self._takes_loaders else self.gradient_accumulation_steps)
        if self._takes_loaders:
            self.gradient_accumulation_steps = getattr(loader, "accumulation", None) or 1
        return self.gradient_accumulation_steps

    def _check_optimizer(self) -> None:
        """At every start of training, whoever made it: it may have been assigned, or been given more parameters."""
        self._take_parameters()
        self._trains_with = [self.optimizer] if self.window.group is not None and self.several is None else []
        for optimizer in self.optimizers:
            when_it_grows(optimizer, self)
        if self.window.updates == 0 and self.several is None:
            self._first_look = look_at_first_update(self, self.optimizer, together=self._reduces)

    def optimizer_grew(self) -> None:
        """While it trains, somebody has given the optimizer more parameters, on all ranks alike. Collective."""
        if self.window.group is not None:
            self._take_parameters()

    def _take_parameters(self) -> None:
        """See to it that the gradients of all that the optimizer holds are averaged. Collective."""
        others: list[nn.Parameter] = []
        for optimizer in self.optimizers:
            check_holds(self, optimizer)
            others += not_the_modules(self, optimizer)
        if others and self._bitwise is not None:
            raise LoopError(
                f"bit-equal training needs an optimizer of the module's parameters only, got {len(others)} others. Move them."
            )
        self.prepared.trains_also(others)

    def pieces_of_step(self, phase: str) -> int:
        return self._pieces_of_step if phase == "train" else 1

    def epoch_closed(self, state: State, phase: str) -> None:
        state.logged.weight = 0 if self.prepared.is_replica else 1  # of no micro-batch
        for guard in self.prepared.guards if phase != "train" else ():
            guard.evaluated()
        if phase == "train" and self.window.count:
            logger.warning("the epoch ended in the middle of an accumulation window; its micro-batches are left out")
            self._leave_window()
            state.logged.discard()
            self.zero_grad(state)
        if phase == "train" and self.lr_interval == "epoch":
            self._advance()
        elif phase == "eval":
            loss = self._evaluation.mean.compute()
            self.has_eval_loss = not self._evaluation.mean.is_empty
            self.eval_loss = loss if self.has_eval_loss else self.eval_loss  # which a step of the unit's own may have set
            self.eval_progress.latest_loss = loss if math.isfinite(loss) else None
            if self._plateau and self._options.lr_monitor is None and state.train_state is not None:
                check_evaluated(self)
                self.lr_scheduler.step(loss)
            if state.recorder is not None and self.has_eval_loss:
                state.recorder.evaluation(self.train_progress.num_updates_completed, "eval_loss", loss)
        elif phase == "test":
            loss = self._evaluation.mean.compute()
            self.test_loss = self.test_loss if self._evaluation.mean.is_empty else loss

    def numbers_settled(self, state: State, phase: str) -> None:
        name = self._options.lr_monitor
        if phase == "eval" and self._plateau and name is not None and state.train_state is not None:
            try:
                value, _ = monitored.number(name, state, self, "eval")
            except monitored.Unknown as error:
                raise LoopError(f"lr_monitor must be the name of a number that is logged, got {name!r}: {error}.") from None
            self.lr_scheduler.step(value)

    def phase_ended(self, state: State, phase: str) -> None:
        self.window.group, self._trains_with = None, []
        if not state.should_stop or state.stopped_by_script:  # the same on all ranks; else it resumes later
            if phase == "train":
                self.prepared.end_training()
            if phase == "train" and 0 < self.window.updates == self.window.empty:
                raise self.window.weightless()
            self._finite.finish(self.window.updates, together=self._reduces)
            if self.swa_model is not None and agree.is_rank0():
                self.swa_model.warn_if_unused()

    def evaluating(self) -> AbstractContextManager[Any]:
        averages = self.swa_model
        return averages.applied() if averages is not None and averages.params.use_in_evaluation else NO_CONTEXT

    def restored(self) -> None:
        """After a checkpoint: steps are micro-batches, of which an update has another number if the accumulation changed."""
        self.window.derive_updates(self.train_progress)
        if not self._takes_loaders:  # else once the loader is known
            self.window.rescale(self.train_progress)
        if self.eval_progress.latest_loss is not None:
            self.eval_loss = self.eval_progress.latest_loss
        self._finite.forget()


def _overrides(unit: object, base: type, name: str) -> bool:
    return name in vars(unit) or getattr(type(unit), name) is not getattr(base, name)
