"""Scale and clip gradients in any mixture of whole and sharded tensors.

A gradient that is whole on every rank (one process, DistributedDataParallel, ZeRO-1) counts once. A DTensor's parts are summed
over the mesh axes that split it, and count once along axes that replicate it. So the norm is

    |g|  =  ( sum over tensors, over the ranks that split them, of |part|^p ) ^ (1/p)

in one small all-reduce per mesh axis, and the same number on every rank.

Everything runs without autograd: with it, torch adds a node to the graph each time that a DTensor's part is read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.shards import local

__all__ = ["clear", "clip_by_norm_", "clip_by_value_", "graph", "pass_zeros", "scale_", "times_changed"]


def clear(optimizer: torch.optim.Optimizer) -> None:
    """Drop all gradients of an optimizer's parameters. Calls the optimizer's own `zero_grad` if it has one. Otherwise does what
    torch's does, without its profiler range, which takes longer than the work (6 us of a step).
    """
    if getattr(type(optimizer), "zero_grad", None) is torch.optim.Optimizer.zero_grad and "zero_grad" not in vars(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    else:
        optimizer.zero_grad(set_to_none=True)


def times_changed(parameter: torch.Tensor) -> int:
    """How often the gradient was changed in place, by torch's count (`_version`, which has no public name); -1 without one."""
    return -1 if parameter.grad is None else parameter.grad._version


@torch.no_grad()
def scale_(parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply every gradient in place. Per rank."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if isinstance(factor, torch.Tensor):
        _multiply(grads, factor)
    elif grads:
        torch._foreach_mul_(grads, factor)


@torch.no_grad()
def clip_by_value_(parameters: Iterable[torch.Tensor], max_value: float) -> None:
    """Clamp every gradient element to [-max_value, max_value]. Per rank."""
    parameters = list(parameters)
    if all(type(p) is nn.Parameter for p in parameters):
        torch.nn.utils.clip_grad_value_(parameters, max_value)  # which tests of scripts replace to see that it is called
        return
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_clamp_min_(grads, -max_value)
        torch._foreach_clamp_max_(grads, max_value)


@torch.no_grad()
def clip_by_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    beside: Sequence[dist.ProcessGroup | None] = (),
    elsewhere: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """Scale all gradients so that their total norm is at most `max_norm`.

    Collective over the ranks that hold different parts: each of them must call it.

    Args:
        max_norm: > 0; inf only measures.
        norm_type: > 0; 2 is the Euclidean norm; inf the largest absolute value.
        beside: groups of ranks that hold entirely different parameters, such as pipeline stages.
        elsewhere: parameters that a rank of these groups has a copy of and counts; here their gradients are only scaled.
    Returns:
        The norm before clipping, a 0-dim tensor, the same number on every rank.
    Raises:
        UsageError: norm_type is not above 0.
    Source: Pascanu et al. 2013, section 3.2, as `torch.nn.utils.clip_grad_norm_` does it.
    """
    parameters = list(parameters)
    if not beside and all(type(p) is nn.Parameter or not hasattr(p, "device_mesh") for p in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    if not norm_type > 0:
        raise LayoutError(f"norm_type must be above 0, or inf, for sharded gradients, got {norm_type:g}.")
    # Phase 1: this rank's parts, by the axes that split them. A kind without a gradient on this rank still joins the all-reduces.
    kinds: dict[Axes, list[torch.Tensor]] = {}
    uncounted: list[torch.Tensor] = []
    others = {id(parameter) for parameter in elsewhere}
    axes: dict[Any, Axes] = {}  # a cache: asking a mesh for its groups takes longer than all other work on a gradient
    for parameter in parameters:
        layout = id(getattr(parameter, "device_mesh", None)), getattr(parameter, "placements", None)
        if layout not in axes:
            axes[layout] = _split_over(parameter)
        parts = kinds.setdefault(axes[layout], [])
        if parameter.grad is not None and (part := local(parameter.grad)).numel():  # a rank's part of a small tensor may be empty
            (uncounted if id(parameter) in others else parts).append(part)
    # Phase 2: their norm over the ranks, in the gradients' dtype; a rank may have no gradient, since shards can be empty.
    dtype = next((p.grad.dtype for p in parameters if p.grad is not None), parameters[0].dtype)
    norm = _over_ranks(kinds, norm_type, local(parameters[0]).device, beside).to(dtype.to_real())
    # Phase 3: one factor for all. Always multiply, as torch does: testing whether it is 1 would wait for the device.
    grads = [*(part for parts in kinds.values() for part in parts), *uncounted]
    if grads and max_norm != math.inf:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        _multiply(grads, factor)
    return norm


# The process groups of the mesh axes that a tensor is split over, in mesh order; empty if it is whole on every rank.
Axes = tuple[Any, ...]


def _split_over(parameter: torch.Tensor) -> Axes:
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return ()
    # Every placement but Replicate splits; gradients of parameters are never Partial.
    return tuple(mesh.get_group(axis) for axis, p in enumerate(parameter.placements) if not p.is_replicate())  # type: ignore[attr-defined]


def _over_ranks(
    kinds: dict[Axes, list[torch.Tensor]], norm_type: float, device: torch.device, beside: Sequence[dist.ProcessGroup | None]
) -> torch.Tensor:
    largest = norm_type == math.inf
    sums, zero = dict[Axes, torch.Tensor](), torch.zeros((), device=device, dtype=torch.float64)
    for axes, parts in kinds.items():
        # In float64: the power of a large float32 norm would overflow.
        norm = torch.nn.utils.get_total_norm(parts, norm_type).to(device, torch.float64) if parts else zero
        sums[axes] = norm if largest else norm**norm_type
    # Reduce over the axis that is last in mesh order first; the result joins the sum of tensors split over the other axes only.
    while any(sums):
        group = max(sums, key=len)[-1]
        axes_here = [axes for axes in sums if group in axes]
        together = torch.stack([sums.pop(axes) for axes in axes_here])
        dist.all_reduce(together, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        for axes, value in zip(axes_here, together, strict=True):
            rest = tuple(g for g in axes if g is not group)
            before = sums.get(rest)
            sums[rest] = value if before is None else (torch.maximum(before, value) if largest else before + value)
    total = sums[()]
    for group in beside:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return total if largest else total ** (1.0 / norm_type)


def _multiply(grads: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply by a 0-dim tensor of any dtype and device, in one operation for all gradients of one dtype and device."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:  # offloaded gradients lie in host memory
        kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), same in kinds.items():
        # If the factor's dtype differs, torch multiplies tensor by tensor. But a half-precision factor would itself be rounded.
        own = dtype if dtype in (torch.float32, torch.float64) else factor.dtype
        torch._foreach_mul_(same, factor.to(device, own))


_NODES_OF_A_LOSS = 64
_VALUES_OF_A_BATCH = 2**20


def pass_zeros(loss: torch.Tensor, where: torch.Tensor | None = None) -> None:
    """Make the coming backward pass give exact zeros: a mean over nothing divides by zero, and 0 times inf would be nan.

    The pass still runs: its collectives and the parameters' hooks happen as on other ranks. Gradients of other ranks' losses,
    which arrive at nodes with `crosses_ranks`, and all gradients that follow from them stay as they are.

    Args:
        where: zero gradients only if this 0-dim tensor on the device is true; the host does not wait for it. Each node then costs
            an operation on the device, so only the nodes nearest to the loss are changed, where means are divided by their
            counts, and of their gradients only those with no more elements than a batch has.
    """
    if where is not None:
        for node in graph(
            [loss.grad_fn], without=lambda node: hasattr(node, "variable") or _crosses(node), most=_NODES_OF_A_LOSS
        ):
            node.register_hook(partial(_zeros_where, where))
        return
    nodes = graph([loss.grad_fn])
    crossing = [node for node in nodes if _crosses(node)]
    others = {*crossing, *graph([following for node in crossing for following, _ in node.next_functions])}
    for node in nodes:
        if node not in others and not hasattr(node, "variable"):  # a parameter's own node stays for later passes
            node.register_hook(_zeros)


def graph(nodes: Iterable[Any], *, without: Callable[[Any], bool] = lambda node: False, most: float = math.inf) -> list[Any]:
    """These nodes of autograd's graph and all that follow in a backward pass, nearest first.

    Args:
        without: skips a node, and the nodes that are reached only through it.
        most: stop at this many nodes.
    """
    seen: dict[Any, None] = {}
    waiting = deque(nodes)
    while waiting and len(seen) < most:
        node = waiting.popleft()
        if node is not None and node not in seen and not without(node):
            seen[node] = None
            waiting.extend(following for following, _ in node.next_functions)
    return list(seen)


def _crosses(node: Any) -> bool:
    return bool(getattr(node, "crosses_ranks", False))


def _zeros(to_inputs: tuple[Any, ...], from_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in to_inputs)


def _zeros_where(where: torch.Tensor, to_inputs: tuple[Any, ...], from_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    def filled(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or gradient.layout is not torch.strided or hasattr(gradient, "device_mesh"):
            return gradient
        if gradient.numel() > _VALUES_OF_A_BATCH:
            return gradient
        return gradient.masked_fill(where if where.device == gradient.device else where.to(gradient.device), 0)

    return tuple(map(filled, to_inputs))
