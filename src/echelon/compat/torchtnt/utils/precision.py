"""torchtnt.utils.precision: from a name to a type."""

from __future__ import annotations

import torch

from echelon.common.errors import UsageError
from echelon.compat.torchtnt.absent import absent
from echelon.parallel.recipe.precision import Precision

__all__ = ["convert_precision_str_to_dtype"]


def convert_precision_str_to_dtype(precision: str) -> torch.dtype | None:
    """torch.float16 for "fp16", torch.bfloat16 for "bf16", None for "fp32".

    Raises:
        UsageError, a ValueError: anything else.
    """
    try:
        return Precision.of(precision).dtype
    except UsageError:
        raise UsageError(f"Precision {precision} not supported. Please use one of ['fp16', 'bf16', 'fp32']") from None


__getattr__ = absent("utils.precision")
