"""`fairscale.optim`: an optimizer whose state is divided over the ranks, and the scaler that goes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.compat.fairscale.absent import later
from echelon.compat.fairscale.optim.oss import OSS

if TYPE_CHECKING:
    from echelon.compat.fairscale.optim.grad_scaler import GradScaler, ShardedGradScaler

__all__ = ["OSS", "GradScaler", "ShardedGradScaler"]

__getattr__ = later("optim", dict.fromkeys(("GradScaler", "ShardedGradScaler"), "optim.grad_scaler"))
