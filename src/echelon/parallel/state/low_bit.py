"""State of optimizers that keep it in a few bits, as torchao's AdamW8bit: in checkpoints it is what it stands for, in float32.

So it goes on under any layout, on any number of ranks, or with another optimizer. It is quantised once more then than without a
stop, as in every step: a run that goes on is not bit-equal.

torchao 0.18 has no public way to make an empty state: `_new_buffer` decides which parameters are large enough for one.
tests/parallel/test_low_bit.py fails when that changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echelon.parallel.shards import local

__all__ = ["as_float", "is_low_bit", "quantise_again"]


def is_low_bit(value: Any) -> bool:
    """Whether it is a tensor that stands for numbers which it does not hold."""
    if not isinstance(value, torch.Tensor):
        return False
    kind = type(local(value))
    return kind is not torch.Tensor and hasattr(kind, "__tensor_flatten__") and "dequantize" in vars(kind)


def as_float(value: Any) -> Any:
    """What it stands for; anything else as it is."""
    if not is_low_bit(value):
        return value
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return value.dequantize()
    numbers = value.to_local().dequantize()
    return DTensor.from_local(
        numbers, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


@torch.no_grad()
def quantise_again(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Give a parameter's state, which was read as numbers, the form in which the optimizer keeps it."""
    make: Callable[[torch.Tensor, bool], torch.Tensor] | None = getattr(optimizer, "_new_buffer", None)
    if make is None or not type(optimizer).__module__.startswith("torchao."):
        return
    state = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() and not is_low_bit(value):
            kept = make(parameter, key == "exp_avg")  # squares have no sign
            local(kept).copy_(local(value))
            state[key] = kept
