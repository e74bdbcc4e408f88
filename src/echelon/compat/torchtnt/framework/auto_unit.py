"""torchtnt.framework.auto_unit: echelon's, with TorchTNT's arguments."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from echelon.common.errors import UsageError, require
from echelon.common.older_words import unknown
from echelon.compat.torchtnt.absent import ARGUMENTS, refuse_arguments
from echelon.compat.torchtnt.framework import unit
from echelon.compat.torchtnt.utils.prepare_module import ActivationCheckpointParams, Strategy, TorchCompileParams
from echelon.loop.auto import auto, prepared_unit
from echelon.loop.auto.auto import TrainStepResults
from echelon.loop.auto.averaged import SWALRParams, SWAParams
from echelon.loop.auto.unit_options import OLDER_WORDS, AutoOptions

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

T = TypeVar("T")

# What TorchTNT has no word for.
_MORE = ("deterministic", "lr_monitor", "stop_after_nonfinite_losses")


class _Configures(ABCMeta):
    """Optimizer and scheduler are built right after the whole constructor; None without training."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        for name in ("optimizer", "lr_scheduler"):  # what the constructor may have set under these names counts for nothing there
            vars(made).pop(name, None)
        if made.training:
            made.configure()
        else:
            made.optimizer = made.lr_scheduler = None
        return made


class _ComputesIn:
    """`precision` is a type there."""

    computes: Any

    @property
    def precision(self) -> torch.dtype | None:
        """The type of autocast; None computes in float32."""
        found: torch.dtype | None = self.computes.dtype
        return found


class AutoUnit(  # type: ignore[misc]
    _ComputesIn,
    auto.AutoUnit[T],
    unit.TrainUnit[T],
    unit.EvalUnit[T],
    unit.PredictUnit[T],
    metaclass=_Configures,
):
    """As `echelon.AutoUnit`.

    Args:
        swa_params: averages as echelon's `ema` keeps them, which count updates.
        options: more of echelon's UnitOptions: deterministic, lr_monitor, stop_after_nonfinite_losses.
    Raises:
        NotHereError: an argument of TorchTNT's that no public program was found to give, with what to take instead.
        UsageError: averages are to be counted in epochs.
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
        require(step_lr_interval in ("step", "epoch"), "step_lr_interval", "'step' or 'epoch'", step_lr_interval)
        if swa_params is not None and step_lr_interval == "epoch":
            raise UsageError(
                "step_lr_interval must be 'step' with swa_params, got 'epoch': averages count updates here. Multiply the numbers "
                "of SWAParams by the updates of an epoch, and let the schedule count updates, too."
            )
        chosen = AutoOptions(
            device=device,
            layout=strategy,
            lr_interval="epoch" if step_lr_interval == "epoch" else "update",
            precision=precision,
            accumulate=gradient_accumulation_steps,
            detect_anomaly=detect_anomaly,
            clip_grad_norm=clip_grad_norm,
            clip_grad_value=clip_grad_value,
            averaging=swa_params,
            compile=torch_compile_params,
            recompute=activation_checkpoint_params,
            training=training,
            retain_graph=loss_backward_retain_graph,
            prefetch=enable_prefetch,
            zero_grad_first=zero_grad_at_train_step_start,
            **_more(type(self), options),
        )
        super().__init__(module=module, options=chosen)


class AutoPredictUnit(_ComputesIn, prepared_unit.AutoPredictUnit[T], unit.PredictUnit[T]):  # type: ignore[misc]
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
            layout=strategy,
            precision=precision,
            compile=torch_compile_params,
            detect_anomaly=detect_anomaly,
            recompute=activation_checkpoint_params,
            prefetch=enable_prefetch,
            **_more(type(self), options),
        )
        super().__init__(module=module, options=chosen)


def _more(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    """Of further arguments those that are echelon's alone.

    Raises:
        UsageError: a word of echelon's for which TorchTNT has its own; one that neither knows.
    """
    refuse_arguments(kind.__name__, {name: value for name, value in options.items() if name in ARGUMENTS})
    theirs = {new: older for older, new in OLDER_WORDS.items()}
    left = {name: value for name, value in options.items() if name not in ARGUMENTS}
    for name in left:
        if name not in _MORE:
            remedy = f"In echelon.compat.torchtnt it is {theirs[name]}, as there." if name in theirs else ""
            raise unknown(kind.__name__, name, _MORE, remedy, older=OLDER_WORDS)
    return left
