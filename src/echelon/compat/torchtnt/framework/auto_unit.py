"""torchtnt.framework.auto_unit: echelon's units with TorchTNT's additional arguments and its values of attributes."""

from __future__ import annotations

import copy
import logging
from abc import ABCMeta
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from echelon.common.errors import UsageError, require
from echelon.compat.torchtnt.absent import ARGUMENTS
from echelon.compat.torchtnt.framework import unit
from echelon.compat.torchtnt.framework.averages import Averages
from echelon.compat.torchtnt.framework.mocks import as_module
from echelon.compat.torchtnt.framework.stages import PredictStages, TrainStages
from echelon.compat.torchtnt.utils.helpers import convert_precision_str_to_dtype
from echelon.compat.torchtnt.utils.prepare_module import (
    ActivationCheckpointParams,
    Strategy,
    TorchCompileParams,
    compilable,
    convert_str_to_strategy,
    refuse_arguments,
)
from echelon.loop.auto import auto, prepared_unit
from echelon.loop.auto.auto import TrainStepResults
from echelon.loop.auto.averaged import SWALRParams, SWAParams
from echelon.loop.auto.unit_options import AutoOptions
from echelon.parallel.prepared import NO_CONTEXT

__all__ = [
    "ActivationCheckpointParams",
    "AutoPredictUnit",
    "AutoUnit",
    "SWALRParams",
    "SWAParams",
    "Strategy",
    "TorchCompileParams",
    "TrainStepResults",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Configures(ABCMeta):
    """Builds optimizer and scheduler right after the whole constructor; without training they are None."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        for name in ("optimizer", "lr_scheduler"):  # TorchTNT drops what a constructor set as these
            vars(made).pop(name, None)
        if made.training:
            made.configure()
        else:
            made.optimizer = made.lr_scheduler = None
        return made


class AutoUnit(
    TrainStages,
    auto.AutoUnit[T],
    unit.TrainUnit[T],
    unit.EvalUnit[T],
    unit.PredictUnit[T],
    metaclass=_Configures,
):
    """As `echelon.AutoUnit`.

    Args:
        options: more of echelon's AutoOptions: compile, deterministic, stop_after_nonfinite_losses.
    Raises:
        NotHereError: an argument of TorchTNT is not supported; the message says what to use instead.
    """

    expects_mean = False

    def __init__(
        self,
        *,
        module: nn.Module,
        device: torch.device | None = None,
        strategy: Any = None,
        step_lr_interval: Literal["step", "epoch"] = "epoch",
        precision: Any = None,
        gradient_accumulation_steps: int = 1,
        detect_anomaly: bool | None = None,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        swa_params: SWAParams | None = None,
        torch_compile_params: Any = None,
        activation_checkpoint_params: Any = None,
        training: bool = True,
        loss_backward_retain_graph: bool | None = None,
        enable_prefetch: bool = True,
        zero_grad_at_train_step_start: bool = False,
        **options: Any,
    ) -> None:
        if gradient_accumulation_steps < 1:
            raise UsageError(f"gradient_accumulation_steps must be > 0. Got {gradient_accumulation_steps}")
        require(step_lr_interval in ("step", "epoch"), "step_lr_interval", "'step' or 'epoch'", step_lr_interval)
        chosen = AutoOptions(
            device=device,
            layout=_checked(strategy),
            lr_interval="epoch" if step_lr_interval == "epoch" else "update",
            precision=_known(precision),
            accumulate=gradient_accumulation_steps,
            detect_anomaly=_detects(detect_anomaly, torch_compile_params),
            clip_grad_norm=clip_grad_norm,
            clip_grad_value=clip_grad_value,
            averaging=swa_params,
            recompute=activation_checkpoint_params,
            training=training,
            retain_graph=loss_backward_retain_graph,
            prefetch=enable_prefetch,
            zero_grad_first=zero_grad_at_train_step_start,
            **_more(type(self), options, torch_compile_params),
        )
        super().__init__(module=as_module(module), options=chosen)

    @property
    def step_lr_interval(self) -> str:
        """`lr_interval` in TorchTNT's words: "epoch" or "step"."""
        return "epoch" if self.lr_interval == "epoch" else "step"

    @step_lr_interval.setter
    def step_lr_interval(self, interval: str) -> None:
        self.lr_interval = "epoch" if interval == "epoch" else "update"

    def may_divide_batches(self) -> bool:
        return False  # limits count micro-batches

    def build_from(self, module: nn.Module, options: AutoOptions) -> None:
        params = options.averaging
        if params is None or params.use_in_evaluation:  # only echelon's own averages can be used there
            super().build_from(module, options)
            return
        source = copy.deepcopy(module) if options.training else None
        super().build_from(module, replace(options, averaging=None))
        self._options, self.swa_params = options, params
        if source is not None:
            self.swa_model = Averages(source, self, params)  # type: ignore[assignment]

    @property
    def loss_backward_retain_graph(self) -> bool | None:
        return self.retain_graph

    @property
    def maybe_autocast_precision(self) -> Any:
        """Context in which losses are computed."""
        dtype = self.computes.dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    # --- steps in a loop, and steps that a program calls itself

    _in_loop = False

    def phase_started(self, state: Any, phase: str) -> None:
        self._in_loop = True
        super().phase_started(state, phase)

    def phase_ended(self, state: Any, phase: str) -> None:
        self._in_loop = False
        super().phase_ended(state, phase)

    def epoch_closed(self, state: Any, phase: str) -> None:
        if phase == "train" and isinstance(self.swa_model, Averages) and self.swa_model.per_epoch:
            self.swa_model.average_if_due()
        super().epoch_closed(state, phase)

    def on_train_epoch_end(self, state: Any) -> None:
        """Close the epoch if a program calls this itself. In a loop, the loop has advanced the schedule."""
        if not self._in_loop and self.lr_interval == "epoch":
            self.epoch_closed(state, "train")

    def evaluating(self) -> Any:
        return NO_CONTEXT if isinstance(self.swa_model, Averages) else super().evaluating()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "on_train_step_end":
            self._reports_step = True


def _checked(strategy: Any) -> Any:
    """The strategy; an unknown name raises TorchTNT's error."""
    return convert_str_to_strategy(strategy) if isinstance(strategy, str) else strategy


def _more(kind: type, options: dict[str, Any], torch_compile_params: Any) -> dict[str, Any]:
    """Options that only echelon has; `compile`, one of them, may also come from `torch_compile_params`."""
    refuse_arguments(kind.__name__, {name: value for name, value in options.items() if name in ARGUMENTS})
    options = {name: value for name, value in options.items() if name not in ARGUMENTS}
    return options if torch_compile_params is None else dict(compile=compilable(torch_compile_params), **options)


def _known(precision: Any) -> Any:
    """The precision; an unknown name raises TorchTNT's error."""
    return convert_precision_str_to_dtype(precision) if isinstance(precision, str) and precision not in _NAMED else precision


_NAMED = ("fp32", "bf16", "fp16", "float8")


def _detects(detect_anomaly: bool | None, compiled: Any) -> bool | None:
    if compiled is None or getattr(compiled, "disable", False) or detect_anomaly is None:
        return detect_anomaly
    logger.warning("torch.compile is enabled, so detect_anomaly is disabled")
    return None


class AutoPredictUnit(PredictStages, prepared_unit.AutoPredictUnit[T], unit.PredictUnit[T]):
    """As `echelon.units.AutoPredictUnit`."""

    def __init__(
        self,
        *,
        module: nn.Module,
        device: torch.device | None = None,
        strategy: Any = None,
        precision: Any = None,
        torch_compile_params: Any = None,
        detect_anomaly: bool | None = None,
        enable_prefetch: bool = False,
        activation_checkpoint_params: Any = None,
        **options: Any,
    ) -> None:
        chosen = AutoOptions(
            device=device,
            layout=_checked(strategy),
            precision=_known(precision),
            detect_anomaly=_detects(detect_anomaly, torch_compile_params),
            recompute=activation_checkpoint_params,
            prefetch=enable_prefetch,
            **_more(type(self), options, torch_compile_params),
        )
        super().__init__(module=as_module(module), options=chosen)

    def predict_step(self, state: Any, data: T) -> Any:
        with NO_CONTEXT if self.detect_anomaly is None else torch.autograd.set_detect_anomaly(self.detect_anomaly):
            return super().predict_step(state, data)
