"""Compute precision: autocast's dtype, and fp16's loss scaling, on which all ranks decide together.

Parameters, gradients and optimizer state stay in float32, sharded or not; `fsdp/units.py` says in which dtype a sharded module is
gathered. In fp16 an update goes

    backward of loss x scale  ->  unscale all gradients, look for inf and nan  ->  the ranks agree  ->  update, or skip it

torch's scalers look at the gradients of an optimizer's parameters. A partitioned optimizer has only some of the parameters on
each rank, and a rank may have only some of their elements. So the scalers get `Shards` in place of the optimizer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from echelon.common.errors import PrecisionError, require
from echelon.common.numbers import number, whole
from echelon.parallel.prepared import NO_CONTEXT, Prepared
from echelon.parallel.recipe.float8 import Float8
from echelon.parallel.shards import is_split, local
from echelon.world import agree

__all__ = ["Precision", "Shards", "check_scaler"]

logger = logging.getLogger(__name__)

_NAMES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """Parameters stay in float32; autocast computes in `dtype` where that is safe. None computes in float32.

    Args:
        dtype: None, torch.float16 or torch.bfloat16.
        float8: with bfloat16: torchao computes the blocks' matrix products in 8 bits.
        init_scale, growth_factor, backoff_factor, growth_interval: fp16's loss scale, as in torch.amp.GradScaler: it starts at
            `init_scale`, is multiplied by `backoff_factor` after an update with an inf, and by `growth_factor` after
            `growth_interval` updates without one.
    Source: Micikevicius et al. 2018, "Mixed Precision Training".
    """

    dtype: torch.dtype | None = None
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    float8: Float8 | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.float16, torch.bfloat16):
            raise PrecisionError(f"dtype must be torch.float16, torch.bfloat16, or None for float32, got {self.dtype}.")
        require(isinstance(self.float8, Float8 | None), "float8", "Float8(...) or None", self.float8, kind=PrecisionError)
        if self.float8 is not None and self.dtype is not torch.bfloat16:
            raise PrecisionError(f"float8 must go with dtype=torch.bfloat16, for all other operations, got {self.dtype}.")
        number("init_scale", self.init_scale, "above 0", lambda scale: 0 < scale < math.inf, kind=PrecisionError)
        number("growth_factor", self.growth_factor, "above 1", lambda factor: 1 < factor < math.inf, kind=PrecisionError)
        number("backoff_factor", self.backoff_factor, "between 0 and 1", lambda factor: 0 < factor < 1, kind=PrecisionError)
        object.__setattr__(
            self, "growth_interval", whole("growth_interval", self.growth_interval, at_least=1, kind=PrecisionError)
        )

    @classmethod
    def of(cls, value: str | torch.dtype | Precision | Float8 | None) -> Precision:
        """From "fp32", "bf16", "fp16", "float8", the torch dtype, a Float8 or a Precision.

        Raises:
            UsageError: anything else.
        """
        if isinstance(value, Precision):
            return value
        if value is None or value is torch.float32:
            return cls()
        if isinstance(value, Float8) or value == "float8":
            return cls(torch.bfloat16, float8=value if isinstance(value, Float8) else Float8())
        if isinstance(value, str) and value in _NAMES:
            return cls(_NAMES[value])
        if value in (torch.float16, torch.bfloat16) and isinstance(value, torch.dtype):
            return cls(value)
        raise PrecisionError(
            f"precision must be 'fp32', 'bf16', 'fp16', 'float8', a torch dtype or ech.layouts.Precision(...), got {value!r}."
        )

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return NO_CONTEXT
        return torch.autocast(device.type, dtype=self.dtype)

    def scaler(self, device: torch.device, prepared: Prepared[Any]) -> torch.amp.GradScaler | None:
        """fp16's gradient scaler, without which small gradients would vanish; None for bf16, which has float32's range."""
        if self.dtype is not torch.float16:
            return None
        names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        if not agree.is_joined() or not (prepared.data.averaged_over > 1 or prepared.place.stages or _is_sharded(prepared)):
            return torch.amp.GradScaler(device.type, **options)
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        # An explicit None: torch's default argument is the group that existed when its module was imported.
        return ShardedGradScaler(device.type, process_group=None, **options)


def check_scaler(scaler: torch.amp.GradScaler | None, precision: Precision, prepared: Prepared[Any]) -> None:
    """Check the scaler before training, and warn of float16 without one.

    Raises:
        UsageError: the user's own scaler would see only this rank's shards, so ranks would decide differently.
    """
    if scaler is None:
        if torch.float16 in (precision.dtype, prepared.form.gathered_in):
            logger.warning(
                "the forward pass computes in float16 without a gradient scaler: gradients below 6e-8 become 0. Give the unit "
                "precision='fp16', which includes one, or compute in bfloat16."
            )
        return
    if agree.is_joined() and _is_sharded(prepared):
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        if not isinstance(scaler, ShardedGradScaler):
            raise PrecisionError(
                f"grad_scaler is a {type(scaler).__name__}, which checks only this rank's shards, so on an inf some ranks would "
                "skip the update and others not. Set its options by "
                "precision=ech.layouts.Precision(torch.float16, init_scale=...)."
            )


def _is_sharded(prepared: Prepared[Any]) -> bool:
    return any(is_split(p) for p in prepared.module.parameters())


class Shards:
    """Stands in for an optimizer in a gradient scaler: this rank's part of every gradient, and the update.

    Attributes:
        optimizer: the real optimizer.
        updated: whether the last `step` of the scaler changed the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        self.optimizer, self._parameters = optimizer, list(parameters)
        self.updated = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self._parts())}]

    def _parts(self) -> Iterator[torch.Tensor]:
        # The optimizer may have fewer parameters (its partition) or more (a temperature outside of the module), and may get more.
        own = (p for group in self.optimizer.param_groups for p in group["params"])
        for parameter in {id(p): p for p in (*self._parameters, *own)}.values():
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                part = gradient.detach()
                part.grad = gradient  # the scaler reads `.grad`, as of a parameter; the same memory
                yield part

    def step(self) -> Any:
        self.updated = True
        return self.optimizer.step()

    def update_with(self, scaler: torch.amp.GradScaler) -> bool:
        """Step the optimizer unless a rank has found an inf, then update the scale. Returns whether the parameters changed."""
        self.updated = False
        scaler.step(self)  # type: ignore[arg-type]
        scaler.update()
        return self.updated
