"""What the ranks that share layers send one another, as functions whose gradients are known.

Each has its opposite, which its backward pass calls: so second derivatives are right, too.

    same  / summed     nothing forward, the sum of all gradients backward / the sum forward, nothing backward
    gathered / part    all ranks' parts of a dimension put together / this rank's part of it
    collected / spread all parts put together, backward the sum of all gradients, of which this rank takes its part / the reverse
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from echelon.parallel.axes import Axis

__all__ = ["collected", "gathered", "part", "same", "spread", "summed"]


def same(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The tensor, which all ranks have, for work that each does a part of: its gradient is the sum of theirs."""
    return _Same.apply(tensor, axis)  # type: ignore[no-any-return,no-untyped-call]


def summed(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of what the ranks have, on all of them."""
    return _Summed.apply(tensor, axis)  # type: ignore[no-any-return,no-untyped-call]


def gathered(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """All ranks' parts of a dimension, for work that each does whole."""
    return _Gathered.apply(tensor, axis, dim % tensor.dim())  # type: ignore[no-any-return,no-untyped-call]


def part(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part of a dimension, which the size of the axis divides, of a tensor that all ranks have."""
    return _Part.apply(tensor, axis, dim % tensor.dim())  # type: ignore[no-any-return,no-untyped-call]


def collected(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """All ranks' parts of a dimension, for work that each does a part of."""
    return _Collected.apply(tensor, axis, dim % tensor.dim())  # type: ignore[no-any-return,no-untyped-call]


def spread(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part of a dimension, which the size of the axis divides, of the sum of what the ranks have."""
    return _Spread.apply(tensor, axis, dim % tensor.dim())  # type: ignore[no-any-return,no-untyped-call]


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        # Not a view, which would keep the input: whoever remembers this on the input would keep both, and their graph, for good.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(gradient, ctx.axis), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return same(gradient, ctx.axis), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _all(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return part(gradient, ctx.axis, ctx.dim), None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return tensor.chunk(axis.size, dim)[axis.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gathered(gradient, ctx.axis, ctx.dim), None, None


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _all(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return spread(gradient, ctx.axis, ctx.dim), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        sent = torch.cat(tensor.chunk(axis.size, dim)) if dim else tensor.contiguous()
        mine = sent.new_empty((sent.shape[0] // axis.size, *sent.shape[1:]))
        dist.reduce_scatter_tensor(mine, sent, group=axis.group)
        return mine

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return collected(gradient, ctx.axis, ctx.dim), None, None


def _all(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    tensor = tensor.contiguous()
    together = tensor.new_empty((axis.size * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(together, tensor, group=axis.group)
    return together if dim == 0 else torch.cat(together.chunk(axis.size), dim)
