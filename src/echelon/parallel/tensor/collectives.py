"""Differentiable collectives among the ranks that share layers.

The functions come in pairs: the backward pass of one calls the other. So second derivatives are right, too.

    same / summed       identity forward, all-reduce backward / all-reduce forward, identity backward
    whole / total       the same for parameters: 16-bit gradients are summed in float32 and rounded once
    gathered / part     all-gather of a dim forward, this rank's part of the gradient backward / the reverse
    collected / spread  all-gather of a dim forward, reduce-scatter of the gradient backward / the reverse
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from echelon.parallel.axes import Axis
from echelon.parallel.older_torch import all_gather_single, reduce_scatter_single

__all__ = ["collected", "gathered", "part", "same", "spread", "summed", "whole"]


def same(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A tensor equal on all ranks, as input of work that is split over them. Its gradient is summed over the ranks."""
    return _sent(tensor, "same", axis)


def whole(parameter: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`same` for a parameter: gradients below 32 bits are summed in float32, since rounding errors would enter every update."""
    return _sent(parameter, "whole", axis)


def summed(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of the ranks' tensors, on all of them."""
    return _sent(tensor, "summed", axis)


def gathered(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """All ranks' parts of a dim, concatenated, as input of work that every rank does in full."""
    return _sent(tensor, "gathered", axis, dim)


def part(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part of a dim of a tensor that is equal on all ranks. The size of the axis must divide the dim."""
    return _sent(tensor, "part", axis, dim)


def collected(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """All ranks' parts of a dim, concatenated, as input of work that is split over the ranks."""
    return _sent(tensor, "collected", axis, dim)


def spread(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part of a dim of the sum of the ranks' tensors. The size of the axis must divide the dim."""
    return _sent(tensor, "spread", axis, dim)


def _sent(tensor: torch.Tensor, way: str, axis: Axis, dim: int = 0) -> torch.Tensor:
    return _Sent.apply(tensor, way, axis, dim % max(1, tensor.dim()))  # type: ignore[no-any-return,no-untyped-call]


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, way: str, axis: Axis, dim: int) -> torch.Tensor:
        ctx.way, ctx.axis, ctx.dim = way, axis, dim
        return _SENDS[way](tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _sent(gradient, _OPPOSITE[ctx.way], ctx.axis, ctx.dim), None, None, None


# --- the collectives


def _nothing(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    # Not a view: `entered` stores the result on the input, and a view would refer back to it, so neither would be freed.
    return tensor.detach()


def _sum(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def _sum_in_float32(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    return _sum(tensor.float(), axis, dim).to(tensor.dtype) if tensor.dtype.itemsize < 4 else _sum(tensor, axis, dim)


def _own(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    return tensor.chunk(axis.size, dim)[axis.rank].contiguous()


def _all(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    tensor = tensor.contiguous()
    together = tensor.new_empty((axis.size * tensor.shape[0], *tensor.shape[1:]))
    all_gather_single(together, tensor, group=axis.group)
    return together if dim == 0 else torch.cat(together.chunk(axis.size), dim)


def _own_of_sum(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    sent = torch.cat(tensor.chunk(axis.size, dim)) if dim else tensor.contiguous()
    own_rows = sent.new_empty((sent.shape[0] // axis.size, *sent.shape[1:]))
    reduce_scatter_single(own_rows, sent, group=axis.group)
    return own_rows


_SENDS = {"same": _nothing, "summed": _sum, "gathered": _all, "part": _own, "collected": _all, "spread": _own_of_sum}
_SENDS |= {"whole": _nothing, "total": _sum_in_float32}
_OPPOSITE = {"same": "summed", "whole": "total", "gathered": "part", "collected": "spread"}
_OPPOSITE |= {opposite: way for way, opposite in _OPPOSITE.items()}
