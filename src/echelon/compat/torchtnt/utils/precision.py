"""torchtnt.utils.precision: from a name to a type, and the loss scaler that fp16 needs."""

from __future__ import annotations

import torch

from echelon.parallel.precision import Precision
from echelon.world import agree

__all__ = ["convert_precision_str_to_dtype", "get_grad_scaler_from_precision"]


def convert_precision_str_to_dtype(precision: str) -> torch.dtype | None:
    """torch.float16 for "fp16", torch.bfloat16 for "bf16", None for "fp32".

    Raises:
        UsageError, a ValueError: anything else.
    """
    return Precision.of(precision).dtype


def get_grad_scaler_from_precision(
    precision: torch.dtype | None, *, is_fsdp1_module: bool | None = False, is_fsdp_module: bool | None = False
) -> torch.amp.GradScaler | None:
    """A scaler for float16, on GPUs and on CPUs; None for the other types.

    Of several ranks all skip an update if one has an inf or nan, whatever way the module is split.

    Args:
        is_fsdp1_module, is_fsdp_module: accepted; the answer does not depend on it.
    """
    if precision is not torch.float16:
        return None
    if not agree.is_joined():
        return torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
    from echelon.compat.fairscale.optim.grad_scaler import ShardedGradScaler

    return ShardedGradScaler()
