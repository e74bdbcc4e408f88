"""What the constructor of an AutoUnit is given besides the module: values, so that a unit can be built once more elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from echelon.contracts.arguments import flags_of
from echelon.contracts.errors import require
from echelon.contracts.numbers import number, whole
from echelon.loop.averaged import SWAParams
from echelon.parallel.activation import Preset
from echelon.parallel.float8 import Float8
from echelon.parallel.layouts import resolve
from echelon.parallel.precision import Precision
from echelon.parallel.recipe import Compile, TorchCompileParams, recipe_of
from echelon.parallel.strategy import Strategy

__all__ = ["AutoOptions", "BuiltAtFirstUse"]

_VALUES: dict[str, type] = {
    "swa_params": SWAParams,
    "torch_compile_params": TorchCompileParams,
}


@dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """The arguments of AutoUnit, which describes them.

    Raises:
        UsageError: a value that makes no sense; before any rank waits for another.
    """

    device: torch.device | None = None
    strategy: Strategy | str | None = None
    step_lr_interval: Literal["step", "epoch"] = "epoch"
    precision: str | torch.dtype | Precision | Float8 | None = None
    gradient_accumulation_steps: int | None = None
    detect_anomaly: bool | None = None
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    swa_params: SWAParams | None = None
    compile: Compile = None
    torch_compile_params: TorchCompileParams | None = None
    activation_checkpoint_params: Preset = None
    training: bool = True
    loss_backward_retain_graph: bool | None = None
    enable_prefetch: bool = True
    zero_grad_at_train_step_start: bool = False
    deterministic: Literal["bitwise"] | None = None
    stop_after_nonfinite_losses: int | None = 10

    def __post_init__(self) -> None:
        flags_of(self)
        if self.gradient_accumulation_steps is not None:
            whole("gradient_accumulation_steps", self.gradient_accumulation_steps, at_least=1, or_none="for the loader's")
        require(self.step_lr_interval in ("step", "epoch"), "step_lr_interval", "'step' or 'epoch'", self.step_lr_interval)
        require(self.deterministic in (None, "bitwise"), "deterministic", "'bitwise' or None", self.deterministic)
        for name, limit in (("clip_grad_norm", self.clip_grad_norm), ("clip_grad_value", self.clip_grad_value)):
            if limit is not None:
                number(name, limit, "above 0, or None for no clipping", lambda most: most > 0)
        if self.stop_after_nonfinite_losses is not None:
            whole("stop_after_nonfinite_losses", self.stop_after_nonfinite_losses, at_least=1, or_none="to go on regardless")
        is_device = isinstance(self.device, torch.device | None)
        require(is_device, "device", "a torch.device or None", self.device, "By default init_from_env() picks it.")
        for name, kind in _VALUES.items():
            value = getattr(self, name)
            require(isinstance(value, kind | None), name, f"{kind.__name__}(...) or None", value)
        compiled, recomputed = recipe_of(self.compile, self.torch_compile_params, self.activation_checkpoint_params)
        object.__setattr__(self, "compile", None)
        object.__setattr__(self, "torch_compile_params", compiled)
        object.__setattr__(self, "activation_checkpoint_params", recomputed)
        Precision.of(self.precision)
        resolve(self.strategy)


class BuiltAtFirstUse:
    """An attribute that `configure` sets. Not `__getattr__`, which would make every attribute of the unit slower to reach."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, unit: Any, owner: type | None = None) -> Any:
        if unit is None or not unit.__dict__.get("training"):
            raise AttributeError(f"no {self._name}: the unit was built with training=False, or its __init__ has not run")
        unit.configure()
        return unit.__dict__.get(self._name)  # None is the schedule beside an optimizer that was assigned
