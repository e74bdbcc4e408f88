"""Reduces each gradient to the rank that owns its parameter; the other ranks drop theirs.

The gradient is the mean over the ranks of each rank's own. Communication, in the backward pass: one reduce per bucket to its
owner, overlapped with the computation. Buckets start in the same order on all ranks, in whatever order their gradients come. A
missing gradient counts as zero, and one number per parameter says whether any rank has one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.gradients.unreduced_params import after_backward

__all__ = ["ToOwners"]

_IN_FLIGHT = 2  # buckets in flight at once: more would hold the memory that this saves


@dataclass
class _Bucket:
    """Parameters of one owner, type and device; `waiting` have no gradient yet in this backward pass."""

    owner: int
    parameters: list[nn.Parameter] = field(default_factory=list)
    waiting: set[nn.Parameter] = field(default_factory=set)
    size: int = 0

    def add(self, parameter: nn.Parameter) -> None:
        self.parameters.append(parameter)
        self.waiting.add(parameter)
        self.size += parameter.numel()


class ToOwners:
    """Reduces the gradients of `parameters` to their owners in every backward pass.

    Args:
        parameters: in the order of the model; only those that require a gradient now are reduced.
        owners: the rank within the group that owns a parameter.
        bucket_size: elements per bucket; a larger parameter has a bucket of its own.
        dtype: the type in which gradients are sent; by default their own.
    Attributes:
        enabled: False accumulates on every rank by itself; the next backward pass with True reduces the sum.
        is_pending: whether there may be something to reduce; callers set it, the same on all ranks.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        owners: Mapping[nn.Parameter, int],
        group: dist.ProcessGroup | None,
        *,
        bucket_size: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.enabled, self.is_pending = True, False
        self._group, self._dtype = group, dtype
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._touched: set[nn.Parameter] = set()  # have a gradient that was not reduced
        self._means: set[nn.Parameter] = set()  # own parameters whose gradient is a mean over the ranks
        self._is_awaited = False
        self._next = 0
        self._flying: deque[tuple[dist.Work, _Bucket, torch.Tensor, list[bool]]] = deque()
        self._hooks: list[Any] = []
        # In reverse, as gradients come.
        chosen = [p for p in reversed(list(parameters)) if p.requires_grad and p in owners] if self._size > 1 else []
        self._buckets = _buckets(chosen, owners, bucket_size)
        self._bucket = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._listen(chosen)

    def _listen(self, parameters: list[nn.Parameter]) -> None:
        before, arrived = WeakMethod(self._before), WeakMethod(self._arrived)

        def on_arrival(parameter: torch.Tensor) -> None:
            method = arrived()
            if method is not None:
                method(parameter)  # type: ignore[arg-type]

        for parameter in parameters:

            def on_accumulation(gradients: Any, parameter: nn.Parameter = parameter) -> None:
                method = before()
                if method is not None:
                    method(parameter)

            # Hook the accumulating node, not the tensor: `torch.autograd.grad` accumulates nothing. It lives while held.
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._hooks += [
                node.register_prehook(on_accumulation),
                parameter.register_post_accumulate_grad_hook(on_arrival),
                node,
            ]

    def succeed(self, other: ToOwners) -> None:
        """Replace another one, and remove its hooks."""
        for hook in other._hooks:
            if hasattr(hook, "remove"):
                hook.remove()
        other._hooks.clear()
        self.enabled, self.is_pending = other.enabled, other.is_pending
        self._touched |= other._touched
        self._means |= other._means

    def _before(self, parameter: nn.Parameter) -> None:
        """Before a gradient is added to one that is a mean over the ranks, turn the mean back into a sum."""
        if parameter in self._means:
            self._means.discard(parameter)
            if parameter.grad is not None:
                parameter.grad.detach().mul_(self._size)

    def _arrived(self, parameter: nn.Parameter) -> None:
        self._touched.add(parameter)
        if not self.enabled:
            return
        if not self._is_awaited:
            self._is_awaited = True
            after_backward(self.finish)
        self._bucket[parameter].waiting.discard(parameter)
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._launch()

    def restart(self) -> None:
        """Forget a backward pass that ended in an error."""
        if self._is_awaited:
            while self._flying:
                self._flying.popleft()[0].wait()
            self._rewind()

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce everything that is not reduced yet. Collective; called automatically at the end of a backward pass."""
        while self._next < len(self._buckets):
            self._launch()
        while self._flying:
            self._land()
        self._rewind()
        self.is_pending = False

    def _rewind(self) -> None:
        self._is_awaited, self._next = False, 0
        for bucket in self._buckets:
            bucket.waiting.update(bucket.parameters)

    @torch.no_grad()
    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        first = bucket.parameters[0]
        flat = torch.empty(bucket.size + len(bucket.parameters), dtype=self._dtype or first.dtype, device=first.device)
        slices, start = [], 0
        for parameter in bucket.parameters:
            part = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            gradient = parameter.grad if parameter in self._touched else None
            slices.append(gradient is not None)
            if gradient is None:
                part.zero_()
                continue
            if gradient.is_sparse:
                raise LayoutError("a gradient is sparse, and cannot be sent to its owner. Build the Embedding with sparse=False.")
            torch.mul(gradient, 1.0 / self._size, out=part)  # before the sum, which might overflow in half precision
            self._touched.discard(parameter)
            if bucket.owner != self._rank:
                parameter.grad = None
        flags = flat[bucket.size :].fill_(1.0)
        for i, present in enumerate(slices):
            if not present:
                flags[i] = 0.0
        if len(self._flying) == _IN_FLIGHT:
            self._land()
        work = dist.reduce(flat, group_dst=bucket.owner, group=self._group, async_op=True)
        assert work is not None
        self._flying.append((work, bucket, flat, slices))

    def _land(self) -> None:
        work, bucket, flat, slices = self._flying.popleft()
        work.wait()
        if bucket.owner != self._rank:
            return
        start = 0
        for i, (parameter, present) in enumerate(zip(bucket.parameters, slices, strict=True)):
            part = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            # The flag is read only if this rank had no gradient: reading waits for the device.
            if present or bool(flat[bucket.size + i] > 0):
                self._take(parameter, part, present)

    def _take(self, parameter: nn.Parameter, mean: torch.Tensor, present: bool) -> None:
        self._means.add(parameter)
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(mean)
        elif present:
            parameter.grad.detach().copy_(mean)
        else:  # from an earlier backward pass, and already a mean
            parameter.grad.detach().add_(mean)


def _buckets(parameters: list[nn.Parameter], owners: Mapping[nn.Parameter, int], size: int) -> list[_Bucket]:
    open_ones: dict[tuple[int, torch.dtype, torch.device], _Bucket] = {}
    done: list[_Bucket] = []
    for parameter in parameters:
        key = (owners[parameter], parameter.dtype, parameter.device)
        bucket = open_ones.get(key)
        if bucket is not None and bucket.size + parameter.numel() > size:
            done.append(open_ones.pop(key))
            bucket = None
        if bucket is None:
            bucket = open_ones[key] = _Bucket(owners[parameter])
        bucket.add(parameter)
    return done + list(open_ones.values())
