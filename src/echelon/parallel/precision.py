"""Compute precision: autocast's type, and the scaler that fp16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from echelon.contracts.errors import UsageError
from echelon.parallel.strategy import NO_CONTEXT

__all__ = ["Precision"]

_NAMES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """Parameters stay in float32; autocast computes in `dtype` where that is safe. None computes in float32."""

    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, value: str | torch.dtype | None) -> Precision:
        """From "fp32", "bf16", "fp16", or the torch dtype.

        Raises:
            UsageError: anything else.
        """
        if value is None or value is torch.float32:
            return cls()
        if isinstance(value, str) and value in _NAMES:
            return cls(_NAMES[value])
        if value in (torch.float16, torch.bfloat16) and isinstance(value, torch.dtype):
            return cls(value)
        raise UsageError(f"precision {value!r}: known are 'fp32', 'bf16' and 'fp16'.")

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return NO_CONTEXT
        return torch.autocast(device.type, dtype=self.dtype)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """fp16's small gradients would vanish without a scaler; bf16 has float32's range and needs none.

        An inf on one rank's shard makes all ranks skip the update: with DDP the reduced gradient carries it to all, with
        FSDP the check itself is over DTensors.
        """
        return torch.amp.GradScaler(device.type) if self.dtype is torch.float16 else None
