"""AutoUnit: the user writes the loss and the optimizer; precision, accumulation, clipping and parallelism are values.

One update, over its micro-batches (`Window` says how they are weighed):

    forward      loss, outputs = compute_loss(state, data)              under autocast
    backward     of the loss, weighted                                   no gradient traffic before the last micro-batch
    update       unscale, weigh, clip by norm, clip by value, optimizer step, zero the gradients, averages, scheduler step

In fp16 an update with an inf is skipped on all ranks: parameters, schedule and averages stay as they are.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from echelon.contracts.errors import LossError, NonFiniteError, UsageError
from echelon.contracts.numbers import whole
from echelon.contracts.overrides import overrides
from echelon.data.parts import Parts
from echelon.data.prefetch import NO_STEP
from echelon.loop.auto_checks import (
    check_accumulation,
    check_made,
    check_options,
    check_own_names,
    check_plateau,
    check_trainable,
)
from echelon.loop.auto_predict import AutoPredictUnit
from echelon.loop.averaged import AveragedWeights, SWAParams, swa_scheduler
from echelon.loop.bitwise import BitEqual
from echelon.loop.finite import FiniteWatch
from echelon.loop.loss import pass_zeros, problem_with, rows
from echelon.loop.metrics import Mean
from echelon.loop.optimizer_checks import check_holds, look_at_first_update, not_the_modules
from echelon.loop.parts import in_order, mean_loss, parts_for
from echelon.loop.rebuild import Built
from echelon.loop.unit import EvalUnit, TestUnit, TrainUnit
from echelon.loop.window import Window
from echelon.parallel.activation import ActivationCheckpointParams
from echelon.parallel.precision import Precision, Shards, check_scaler
from echelon.parallel.prepared import NO_CONTEXT
from echelon.parallel.recipe import TorchCompileParams
from echelon.parallel.strategy import Strategy
from echelon.world import agree, streams

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["AutoUnit", "TrainStepResults"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _BuiltAtFirstUse:
    """An attribute that `configure` sets. Not `__getattr__`, which would make every attribute of the unit slower to reach."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, unit: Any, owner: type | None = None) -> Any:
        if unit is None or not unit.__dict__.get("training"):
            raise AttributeError(f"no {self._name}: the unit was built with training=False, or its __init__ has not run")
        unit.configure()
        return unit.__dict__[self._name]


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


class AutoUnit(AutoPredictUnit[T], TrainUnit[T], EvalUnit[T], TestUnit[T]):
    """Training, evaluation, prediction and testing of one module with one optimizer.

    Write `compute_loss(state, data) -> (loss, outputs)`, with a *mean* loss, and
    `configure_optimizers_and_lr_scheduler(module) -> (optimizer, scheduler or None)`. Several optimizers are a TrainUnit's
    business.

    Args:
        module: the model; `self.module` is what the strategy made of it.
        device: by default `init_from_env()`'s, which also joins the ranks.
        strategy: a Strategy, its name, or None for a module that is wrapped already or stays as it is.
        step_lr_interval: call the scheduler after every "step" (that is, update) or every "epoch".
        precision: "fp32", "bf16", "fp16" (with a gradient scaler), a torch dtype, or a Precision with the scaler's options.
            Parameters stay float32.
        gradient_accumulation_steps: micro-batches per update. A shorter last window of an epoch keeps its full weight.
        detect_anomaly: stop with the rank and the value at the first loss that is inf or nan, before it reaches the
            parameters, and trace what produced it (`torch.autograd.set_detect_anomaly`; slow).
        clip_grad_norm: largest norm of the whole model's gradient; inf only measures it.
        clip_grad_value: largest absolute value of a gradient element.
        swa_params: average the weights along training; `swa_model` then holds the averages.
        torch_compile_params, activation_checkpoint_params: compile, and recompute activations.
        training: False builds no optimizer.
        loss_backward_retain_graph: passed to `backward`.
        enable_prefetch: copy the next batch to a GPU while this one computes.
        deterministic: "bitwise" makes the parameters after any number of steps bit-equal on 1, 2, 4, ... ranks, for noop,
            ddp, fsdp and zero1 to zero3: `parallel/fixed_order` says how, BENCHMARKS.md what it costs. `bitwise_parts` is how
            many micro-batches a global batch has then, over all ranks.
        zero_grad_at_train_step_start: clear gradients before an update's first micro-batch instead of after the update, so
            that hooks can look at them.
        stop_after_nonfinite_losses: end the run with NonFiniteError after so many updates in a row whose loss over the global
            batch is inf or nan; None goes on regardless. 10 is more than a few bad batches, which fp16's scaler leaves out and a
            run may survive, and few enough to lose nothing. A run without one finite loss ends so, too, however short it is.
    """

    # What `weight` counts; names the throughput in metrics.jsonl: "<weight_unit>_per_s".
    weight_unit = "samples"
    # With deterministic="bitwise": micro-batches of a global batch over all ranks, a power of two that the ranks divide.
    bitwise_parts = 4

    constructed: Built  # how this constructor ran
    optimizer: torch.optim.Optimizer = _BuiltAtFirstUse()  # type: ignore[assignment]
    lr_scheduler: Any = _BuiltAtFirstUse()
    may_lack = ("grad_scaler", "_bitwise")

    def __init__(
        self,
        *,
        module: nn.Module,
        device: torch.device | None = None,
        strategy: Strategy | str | None = None,
        step_lr_interval: Literal["step", "epoch"] = "epoch",
        precision: str | torch.dtype | Precision | None = None,
        gradient_accumulation_steps: int = 1,
        detect_anomaly: bool | None = None,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        swa_params: SWAParams | None = None,
        torch_compile_params: TorchCompileParams | None = None,
        activation_checkpoint_params: ActivationCheckpointParams | None = None,
        training: bool = True,
        loss_backward_retain_graph: bool | None = None,
        enable_prefetch: bool = True,
        zero_grad_at_train_step_start: bool = False,
        deterministic: Literal["bitwise"] | None = None,
        stop_after_nonfinite_losses: int | None = 10,
    ) -> None:
        given, before = dict(locals()), set(vars(self))
        gradient_accumulation_steps = whole("gradient_accumulation_steps", gradient_accumulation_steps, at_least=1)
        check_options(step_lr_interval, clip_grad_norm, clip_grad_value, stop_after_nonfinite_losses)
        super().__init__(
            module=module,
            device=device,
            strategy=strategy,
            precision=precision,
            torch_compile_params=torch_compile_params,
            activation_checkpoint_params=activation_checkpoint_params,
            detect_anomaly=detect_anomaly,
            enable_prefetch=enable_prefetch,
        )
        self.training = training
        self.step_lr_interval = step_lr_interval
        parts = overrides().parts or (self.bitwise_parts if deterministic == "bitwise" else None)
        self._bitwise = BitEqual(parts, self.prepared) if parts and training else None
        steps = overrides().accumulation or gradient_accumulation_steps
        self.gradient_accumulation_steps = self._bitwise.accumulation if self._bitwise is not None else steps
        self.clip_grad_norm, self.clip_grad_value = clip_grad_norm, clip_grad_value
        self.retain_graph = loss_backward_retain_graph
        self.zero_grad_at_train_step_start = zero_grad_at_train_step_start
        self.grad_scaler = self.precision.scaler(self.device, self.prepared) if training else None
        self._shards: Shards | None = None
        self.swa_params = swa_params
        self.swa_model = AveragedWeights(self.prepared, swa_params) if swa_params is not None and training else None
        self.swa_scheduler: Any = None
        self._plateau = False
        self.window = Window(self.gradient_accumulation_steps, fixed=self._bitwise is not None)
        self.eval_loss = self.test_loss = float("nan")  # of the latest evaluation and test, over all ranks
        self._evaluation = _EvalLoss()
        self._parts_of_step = 1
        self._reduces = False  # whether windows are summed over ranks
        self._finite = FiniteWatch(stop_after_nonfinite_losses)
        self.latest_update: tuple[Any, Any] = (None, None)  # loss over the global batch and gradient norm, if it is clipped
        self._given_strategy = strategy
        self._reports_step = _overrides(self, AutoUnit, "on_train_step_end")
        arguments = {name: value for name, value in given.items() if name not in ("self", "module", "__class__")}
        self.constructed = Built(arguments, frozenset({*vars(self), "constructed"} - before))

    # --- what the user writes

    @abstractmethod
    def compute_loss(self, state: State, data: T) -> tuple[torch.Tensor, Any]:
        """The mean loss of a micro-batch, a scalar with a gradient, and anything that hooks should see."""

    @abstractmethod
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        """The optimizer over the parameters of `module`, which has its final form, and a scheduler or None.

        Called once, when the optimizer is first needed, after the whole constructor of your class.
        """

    def weight(self, data: T) -> float | torch.Tensor:
        """What a micro-batch counts in the mean over the global batch: its rows. A language model counts tokens, where their
        number differs: `return echelon.count_tokens(data, next_token=True)`.

        A number if it is known on the host; a 0-dim tensor on the device is summed up there without waiting.
        """
        return rows(data)

    def on_train_step_end(self, state: State, data: T, step: int, results: TrainStepResults) -> None:
        """After a step; `step` counts from 0."""

    def on_eval_step_end(self, state: State, data: T, step: int, loss: torch.Tensor, outputs: Any) -> None:
        """After an evaluation step; within `fit`, `step` is the number of training steps so far."""

    def on_test_step_end(self, state: State, data: T, step: int, loss: torch.Tensor, outputs: Any) -> None:
        """After a test step."""

    def step_lr_scheduler(self) -> None:
        """Advance the scheduler by one interval; override for one that wants a metric.

        A ReduceLROnPlateau advances after each evaluation within `fit` instead, with `eval_loss`.
        """
        if self.lr_scheduler is not None and not self._plateau:
            self.lr_scheduler.step()

    def zero_grad(self, state: State) -> None:
        """Drop all gradients. What torch's own `zero_grad` does, without its profiler range, which takes longer than the work."""
        optimizer = self.optimizer
        if type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad and "zero_grad" not in vars(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:  # an optimizer with one of its own
            optimizer.zero_grad(set_to_none=True)

    # --- what the loops call

    def configure(self) -> None:
        """Build optimizer and scheduler if they are not built yet."""
        if not self.training or self.__dict__.get("optimizer") is not None:
            return  # None is what TorchTNT scripts may have set
        made = self.prepared.optimizer(self.configure_optimizers_and_lr_scheduler)
        check_made(type(self).__name__, made)
        check_holds(self, made[0])
        self.optimizer, self.lr_scheduler = made
        plateau = isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._plateau = plateau and not _overrides(self, AutoUnit, "step_lr_scheduler")
        if self.swa_params is not None and self.swa_params.swalr_params is not None:
            self.swa_scheduler = swa_scheduler(self.optimizer, self.swa_params.swalr_params)

    def app_state(self) -> dict[str, Any]:
        self.configure()
        return super().app_state()

    @property
    def at_boundary(self) -> bool:
        return self.window.count == 0

    @property
    def agrees_to_stop(self) -> bool:
        return self._reduces and not self._reports_step and not _overrides(self, AutoUnit, "train_step")

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
            together = self.prepared.dp_size > 1 or self.prepared.forward_is_collective
            self._reduces = agree.is_joined() and together
            check_trainable(self, together=self._reduces or not agree.is_joined(), has_strategy=self._given_strategy is not None)
            self.configure()
            self._check_optimizer()
            if self._finite.is_long:  # of an earlier call; the caller has caught it
                self._finite.forget()
            if self._plateau:
                check_plateau(state)
            if self.grad_scaler is not None:
                check_scaler(self.grad_scaler, self.prepared)
                self._shards = Shards(self.optimizer, self.module.parameters())
            loader: Any = getattr(state.train_state, "dataloader", None)
            if self._bitwise is None:
                steps = ("train_step", "get_next_train_batch")
                self._parts_of_step = parts_for(loader, any(_overrides(self, AutoUnit, name) for name in steps))
            elif hasattr(loader, "accumulation"):  # whose micro-batches are equally large on any number of ranks
                loader.accumulation, loader.shares = self._bitwise.accumulation, self._bitwise.parts
            check_accumulation(loader, self.gradient_accumulation_steps)
            if self._bitwise is None:  # whose streams belong to samples, not to ranks
                streams.separate(self.prepared.dp_rank)
        else:
            self.prepared.before_evaluation()
            if phase != "predict":
                self._evaluation.mean.reset()

    def _check_optimizer(self) -> None:
        """At every start of training, whoever made it: it may have been assigned, or been given more parameters."""
        check_holds(self, self.optimizer)
        others = not_the_modules(self, self.optimizer)
        if others and self._bitwise is not None:
            raise UsageError(
                f"bit-equal training: the optimizer has {len(others)} parameter(s) outside of the module. Make them part of it."
            )
        self.prepared.trains_also(others)
        if self.window.updates == 0:
            look_at_first_update(self, self.optimizer, together=self._reduces)

    def parts_of_step(self, phase: str) -> int:
        return self._parts_of_step if phase == "train" else 1

    def epoch_closed(self, state: State, phase: str) -> None:
        if phase == "train" and self.window.count:
            logger.warning("the epoch ended in the middle of an accumulation window: its micro-batches are left out")
            self.window.discard()
            if self._bitwise is not None:
                self._bitwise.discard()
            self.zero_grad(state)
        if phase == "train" and self.step_lr_interval == "epoch":
            self._advance()
        elif phase == "eval":
            self.eval_loss = loss = self._evaluation.mean.compute()
            self.eval_progress.latest_loss = loss if math.isfinite(loss) else None
            if self._plateau and state.train_state is not None:
                self.lr_scheduler.step(self.eval_loss)
            if state.recorder is not None:
                state.recorder.evaluation(self.train_progress.num_steps_completed, "eval_loss", self.eval_loss)
        elif phase == "test":
            self.test_loss = self._evaluation.mean.compute()

    def phase_ended(self, state: State, phase: str) -> None:
        if not state.should_stop or state.stopped_by_script:  # the same on all ranks; else it goes on later
            self._finite.finish(self.window.updates, together=self._reduces)
            if self.swa_model is not None and agree.is_rank0():
                self.swa_model.warn_if_unused()

    def train_step(self, state: State, data: T) -> tuple[torch.Tensor, Any]:
        """One micro-batch, and an update if it ends its window. Returns the detached loss and the outputs."""
        window, prepared = self.window, self.prepared
        if self._finite.is_long:  # here: callbacks such as RollBack have seen the update before, and may have gone back
            self._finite.raise_if_long(together=self._reduces)
        here = state.train_state.step if state.train_state is not None else NO_STEP
        last, padded = window.open(here.is_last), here.is_padding
        earlier: list[tuple[Any, Any]] = []  # pieces and their weights
        if isinstance(data, Parts):
            *others, (data, padded) = in_order(data, padded)
            earlier = [(piece, self._weigh(piece, nothing)) for piece, nothing in others]
        weight = self._weigh(data, padded)
        if window.reference is None:
            whole = weight + sum(w for _, w in earlier)
            window.estimate(0 if prepared.is_replica else whole, over_ranks=self._reduces)
        if self.zero_grad_at_train_step_start and window.count == 1:
            self.zero_grad(state)

        losses = []
        for piece, its_weight in earlier:
            self._compute((state, piece, its_weight, False))
            losses.append(window.latest_loss)
        outputs = self._compute((state, data, weight, last))
        loss = window.latest_loss
        if earlier:
            loss = mean_loss([*losses, loss], [*(w for _, w in earlier), weight])
        norm = self._update(state) if last else None
        if self._reports_step:
            step = self.train_progress.num_steps_completed
            self.on_train_step_end(state, data, step, TrainStepResults(loss, norm, outputs))
        return loss, outputs

    def _weigh(self, data: T, padded: bool) -> Any:
        weight = 0 if padded else self.weight(data)
        if isinstance(weight, torch.Tensor):  # whole numbers in float32 end at 16 million; waiting for a CPU costs nothing
            return float(weight) if weight.device.type == "cpu" else weight.double()
        return weight

    def _compute(self, micro_batch: tuple[State, T, Any, bool]) -> Any:
        """Forward and backward; with `last`, gradients are summed up over the ranks. Returns the outputs."""
        prepared, last = self.prepared, micro_batch[3]
        reduce = last or self._bitwise is not None
        with prepared.accumulate(reduce), torch.autograd.set_detect_anomaly(True) if self.detect_anomaly else NO_CONTEXT:
            if self._bitwise is None:
                return prepared.forward_backward(micro_batch, self._forward, self._backward)[1]
            work = partial(prepared.forward_backward, micro_batch, self._forward, self._backward)
            return self._bitwise.run(work, self.window.updates, self.window.count - 1, last=last)[1]

    def _forward(self, micro_batch: tuple[State, T, Any, bool]) -> tuple[torch.Tensor, Any]:
        state, data, _, _ = micro_batch
        if self.precision.dtype is None:
            made = self.compute_loss(state, data)
        else:
            with self.autocast():
                made = self.compute_loss(state, data)
        if (
            type(made) is not tuple
            or len(made) != 2
            or not isinstance(loss := made[0], torch.Tensor)
            or loss.dim()
            or not loss.requires_grad
        ):
            self._refuse(made)
        if self.detect_anomaly:
            self._check_finite(made[0], micro_batch[2])
        return made

    def _refuse(self, made: Any) -> None:
        problem = problem_with(made, self.module)
        if problem is not None:
            raise LossError(f"{type(self).__name__}.compute_loss returned {problem}")

    def _check_finite(self, loss: torch.Tensor, weight: Any) -> None:
        """Before the backward pass, and agreed: a rank that raised alone would leave the others waiting in a collective."""
        values = agree.gather(str(float(loss.detach()) if float(weight) else 0.0))
        bad = [f"rank {r}: {v}" for r, v in enumerate(values) if v in ("nan", "inf", "-inf")]
        if bad:
            step = self.train_progress.num_steps_completed
            raise NonFiniteError(f"step {step}: the loss is not finite ({', '.join(bad)}). The parameters were not changed.")

    def _backward(self, loss: torch.Tensor, micro_batch: tuple[State, T, Any, bool]) -> None:
        state, _, weight, last = micro_batch
        window = self.window
        window.add(loss.detach(), 0 if self.prepared.is_replica else weight)
        if last and self._reduces:
            window.start_reduction(state.stop_requested)
        assert window.reference is not None
        scale = weight * self.prepared.dp_size / window.reference
        if self.grad_scaler is not None:
            loss = self.grad_scaler.scale(loss)
        if not isinstance(scale, torch.Tensor) and scale == 0:
            pass_zeros(loss)
        if isinstance(scale, float) and scale == 1.0:
            loss.backward(retain_graph=self.retain_graph)
        else:
            # As the first gradient of the chain rule: the weight costs no operation of its own.
            start = scale.to(loss) if isinstance(scale, torch.Tensor) else loss.new_tensor(scale)
            loss.backward(gradient=start.reshape(()), retain_graph=self.retain_graph)

    def _update(self, state: State) -> torch.Tensor | None:
        window, prepared, scaler, optimizer = self.window, self.prepared, self.grad_scaler, self.optimizer
        micro_batches = window.count
        weight, loss, stop = window.close()
        self._finite.take(loss, window.own_loss, window.updates - 1, micro_batches, self.train_progress)
        if stop:
            state.agree_to_stop()
        if scaler is not None:
            scaler.unscale_(self._shards)  # type: ignore[arg-type]
        assert window.reference is not None
        if isinstance(weight, torch.Tensor):  # on a device: nothing waits for it
            prepared.scale_grads(window.reference / weight)
        elif weight != window.reference:
            prepared.scale_grads(window.reference / weight)
            window.reference = window.reference if window.fixed else float(weight)
        norm = prepared.clip_grad_norm_(self.clip_grad_norm) if self.clip_grad_norm is not None else None
        if self.clip_grad_value is not None:
            prepared.clip_grad_value_(self.clip_grad_value)
        self.latest_update = (loss, norm)
        lr = optimizer.param_groups[0]["lr"]
        updated = True
        if scaler is not None:
            assert self._shards is not None
            updated = self._shards.update_with(scaler)
            self._finite.take_skip(not updated, scaler)
        else:
            optimizer.step()
        if not self.zero_grad_at_train_step_start:
            self.zero_grad(state)
        if updated and self.swa_model is not None:
            self.swa_model.step()
        if updated and self.step_lr_interval == "step":
            self._advance()
        if state.recorder is not None:
            state.recorder.update(self.train_progress.num_steps_completed + 1, window.updates, loss, weight, lr, norm)
        return norm

    def _advance(self) -> None:
        """After an update or an epoch, as `step_lr_interval` says: the schedule, or the averages' own once these have begun."""
        if self.swa_scheduler is not None and self.swa_model is not None and self.swa_model.begun:
            self.swa_scheduler.step()
        else:
            self.step_lr_scheduler()

    def evaluating(self) -> AbstractContextManager[Any]:
        averages = self.swa_model
        return averages.applied() if averages is not None and averages.params.use_in_evaluation else NO_CONTEXT

    def eval_step(self, state: State, data: T) -> tuple[torch.Tensor, Any]:
        """The loss of a batch, counted into `eval_loss` by its weight."""
        with self.autocast():
            loss, outputs = self.compute_loss(state, data)
        if state.eval_state is None or not state.eval_state.step.is_padding:
            self._evaluation.mean.update(loss, self.weight(data))
            within_fit = state.train_state is not None
            step = (self.train_progress if within_fit else self.eval_progress).num_steps_completed
            self.on_eval_step_end(state, data, step, loss, outputs)
        return loss, outputs

    def test_step(self, state: State, data: T) -> tuple[torch.Tensor, Any]:
        """As `eval_step`, counted into `test_loss`."""
        with self.autocast():
            loss, outputs = self.compute_loss(state, data)
        if state.test_state is None or not state.test_state.step.is_padding:
            self._evaluation.mean.update(loss, self.weight(data))
            self.on_test_step_end(state, data, self.test_progress.num_steps_completed, loss, outputs)
        return loss, outputs

    def restored(self) -> None:
        """After a checkpoint: steps are micro-batches, of which an update has another number if the accumulation changed."""
        self.window.rescale(self.train_progress)
        if self.eval_progress.latest_loss is not None:
            self.eval_loss = self.eval_progress.latest_loss
        self._finite.forget()


class _EvalLoss:
    """Holds the running mean outside the unit's saved state: it is finished before a checkpoint can be taken."""

    def __init__(self) -> None:
        self.mean = Mean()


def _overrides(unit: object, base: type, name: str) -> bool:
    return name in vars(unit) or getattr(type(unit), name) is not getattr(base, name)
