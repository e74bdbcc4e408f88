"""`ShardedGradScaler`: a loss scaler whose ranks skip an update together, on GPUs and on CPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler as TorchGradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

__all__ = ["ShardedGradScaler"]

# Arguments of torch.amp.GradScaler, in FairScale's order.
_ORDER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled", "process_group")


class ShardedGradScaler(TorchShardedGradScaler):  # type: ignore[misc, unused-ignore]
    """torch's scaler of this name, with FairScale's order of arguments: an inf or nan on one rank makes all ranks skip.

    Args:
        args, options: init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.amp.GradScaler; and
            process_group, the ranks that hold parts of one model, by default all.
        device: the loss's device; by default a GPU if there is one.
    """

    def __init__(self, *args: Any, device: str | None = None, **options: Any) -> None:
        super().__init__(
            device or ("cuda" if torch.cuda.is_available() else "cpu"),
            **dict(zip(_ORDER[: len(args)], args, strict=True)),
            **options,
        )
        self._unscaled: set[torch.optim.Optimizer] = set()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if dist.is_initialized():
            super().unscale_(optimizer)
        else:  # torch's ShardedGradScaler would need a group
            TorchGradScaler.unscale_(self, optimizer)
        self._unscaled.add(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        # A fused optimizer looks for infs itself, on this rank only, unless gradients are unscaled already.
        if self.is_enabled() and optimizer not in self._unscaled and getattr(optimizer, "_step_supports_amp_scaling", False):
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        self._unscaled.clear()
        super().update(new_scale)
