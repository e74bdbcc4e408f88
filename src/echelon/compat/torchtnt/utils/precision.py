"""torchtnt.utils.precision: from a name to a type, and the loss scaler that fp16 needs."""

from __future__ import annotations

from typing import Any

import torch

from echelon.common.errors import UsageError
from echelon.parallel.recipe.precision import Precision
from echelon.world import agree

__all__ = ["convert_precision_str_to_dtype", "get_grad_scaler_from_precision"]


def convert_precision_str_to_dtype(precision: str) -> torch.dtype | None:
    """torch.float16 for "fp16", torch.bfloat16 for "bf16", None for "fp32".

    Raises:
        UsageError, a ValueError: anything else.
    """
    try:
        return Precision.of(precision).dtype
    except UsageError:
        raise UsageError(f"Precision {precision} not supported. Please use one of ['fp16', 'bf16', 'fp32']") from None


def get_grad_scaler_from_precision(
    precision: torch.dtype | None,
    *,
    is_fsdp1_module: bool | None = False,
    is_fsdp_module: bool | None = False,
    grad_scaler_kwargs: dict[str, Any] | None = None,
) -> torch.amp.GradScaler | None:
    """A scaler for float16, on GPUs and on CPUs; None for the other types.

    Of several ranks all skip an update if one has an inf or nan, whatever way the module is split.

    Args:
        is_fsdp1_module: the module is in torch's older FullyShardedDataParallel, which has a scaler of its own.
        is_fsdp_module: the older name.
        grad_scaler_kwargs: options of the scaler, such as `init_scale`.
    """
    if precision is not torch.float16:
        return None
    device, options = "cuda" if torch.cuda.is_available() else "cpu", grad_scaler_kwargs or {}
    if is_fsdp1_module or is_fsdp_module:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as OfOlderFSDP

        return OfOlderFSDP(device=device, **options)
    if not agree.is_joined():
        return torch.amp.GradScaler(device, **options)
    from echelon.compat.fairscale.optim.grad_scaler import ShardedGradScaler

    return ShardedGradScaler(**options)
