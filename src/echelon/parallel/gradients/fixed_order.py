"""Bit-equal numbers on 1, 2, 4, ... ranks: gradients are summed in one order, whichever rank computed them.

Every global batch is split into the same number of parts, a power of two, whatever the number of ranks: part p is micro-batch
p // ranks of rank p % ranks. The parts' gradients are summed in a binary tree: neighbours first, then pairs of neighbours.
Parts of one micro-batch lie on neighbouring ranks, so a reduction over the ranks is the lower half of the tree, and the sum over
a rank's micro-batches is the upper half:

    1 rank     (g0 + g1) + (g2 + g3)       four micro-batches
    2 ranks    (g0 + g1) + (g2 + g3)       each bracket a reduction
    4 ranks    (g0 + g1) + (g2 + g3)       one reduction

Floating-point addition depends only on the order, so the sums are equal to the last bit. Dividing by the number of ranks, a
power of two, rounds nothing. The cost: every micro-batch is reduced, and by gathering instead of a ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.parallel.shards import local, whole

__all__ = ["GradientTree", "TreeReduceScatter", "clip_in_order_", "is_power_of_two", "reduce_bucket", "tree_sum"]


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of 2**n tensors of one shape, neighbours first. Overwrites the tensors."""
    level = list(parts)
    while len(level) > 1:
        level = [a.add_(b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def reduce_bucket(group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DistributedDataParallel: the mean over the ranks, summed in tree order."""
    own_gradients: torch.Tensor = bucket.buffer()
    size = dist.get_world_size(group)
    gathered = [torch.empty_like(own_gradients) for _ in range(size)]
    work = dist.all_gather(gathered, own_gradients, group=group, async_op=True)
    assert work is not None

    def add(_: Any) -> torch.Tensor:
        own_gradients.copy_(tree_sum(gathered).div_(size))
        return own_gradients

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(add)
    return future


class TreeReduceScatter:
    """As `reduce_bucket`, for `FSDPModule.set_custom_reduce_scatter`: each rank receives all parts of its shard and sums them."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        size = dist.get_world_size(group)
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        total = tree_sum(list(parts.view(size, -1)))
        output_tensor.copy_(total.view_as(output_tensor))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(size)


class GradientTree:
    """Sums the gradients of a window's micro-batches in tree order: a binary counter of sums that are not paired yet."""

    def __init__(self) -> None:
        self._count = 0
        self._waiting: list[dict[nn.Parameter, torch.Tensor]] = []

    def add(self, parameters: Sequence[nn.Parameter], *, last: bool) -> None:
        """Add the gradients of one micro-batch. After the window's last one, the parameters' gradients are the window's sum."""
        carry = {p: p.grad for p in parameters if p.grad is not None}
        paired = self._count
        while paired & 1:
            carry = _pair(self._waiting.pop(), carry)
            paired >>= 1
        self._count += 1
        if not last:
            self._waiting.append({p: g.clone() for p, g in carry.items()})
            for p in parameters:
                p.grad = None
            return
        while self._waiting:  # the window's length is not a power of two
            carry = _pair(self._waiting.pop(), carry)
        for p, total in carry.items():
            if p.grad is None:
                p.grad = total
            elif p.grad is not total:
                p.grad.copy_(total)
        self._count = 0

    def clear(self) -> None:
        """Forget an unfinished window."""
        self._count, self._waiting = 0, []


def _pair(earlier: dict[nn.Parameter, torch.Tensor], later: dict[nn.Parameter, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
    """earlier + later; a parameter that only one of them used keeps that gradient."""
    both = {p: earlier[p] + later[p] for p in earlier.keys() & later.keys()}
    return {**earlier, **later, **both}


def clip_in_order_(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """As `clip.clip_by_norm_`, but the norm is computed from whole tensors, so it is the same number whether sharded or not."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(whole(g), norm_type) for g in grads]), norm_type
    )
    if max_norm != math.inf:
        torch._foreach_mul_([local(g) for g in grads], torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
