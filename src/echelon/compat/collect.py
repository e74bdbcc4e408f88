"""Values with tensors in them, from all ranks to one or to all, without pickle.

Everything but tensors travels as JSON: numbers, strings, None, and dicts, lists and tuples of these and of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from echelon.common.errors import RanksDisagreeError
from echelon.world import agree
from echelon.world.tensor_bytes import flat_bytes

__all__ = ["collect", "gather_tensors"]


def collect(value: Any, to: int | None = None, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Every rank's value, by rank, with its tensors in host memory. Collective over the group.

    Tensors travel one at a time, so a rank needs memory for one tensor beside its result.

    Args:
        to: the rank within the group that gets the values; None is every rank.
    Returns:
        The values; None on a rank that gets nothing.
    """
    tensors: list[torch.Tensor] = []
    form = _form(value, tensors)
    if not agree.is_joined() or dist.get_world_size(group) == 1:
        return [_filled(form, iter([t.detach().to("cpu", copy=True) for t in tensors]))]
    forms = agree.gather(form, group)
    rank, (group, device) = dist.get_rank(group), agree.channel(group)
    values: list[Any] | None = [] if to in (None, rank) else None
    for owner, each in enumerate(forms):
        own_tensors, arrived = iter(tensors), []
        for dtype, shape in _tensors(each):
            if owner == rank:
                content = next(own_tensors).detach().to(device, copy=True).reshape(-1).contiguous()
            else:
                content = torch.empty(math.prod(shape), dtype=getattr(torch, dtype), device=device)
            if content.numel():
                dist.broadcast(flat_bytes(content), group_src=owner, group=group)  # as bytes: backends support few dtypes
            if values is not None:
                arrived.append(content.reshape(shape).cpu())
        if values is not None:
            values.append(_filled(each, iter(arrived)))
    return values


def gather_tensors(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Every rank's tensor, by rank, on every rank's own device. Collective over the group. Shapes may differ.

    One all-gather of as many bytes as the largest has; gradients do not flow back.

    Raises:
        RanksDisagreeError: the ranks have tensors of different types.
    """
    own = tensor.detach()
    if not agree.is_joined() or dist.get_world_size(group) == 1:
        return [own.clone()]
    kinds = agree.gather([str(tensor.dtype), list(tensor.shape)], group)
    if len({dtype for dtype, _ in kinds}) > 1:
        shown = ", ".join(f"rank {rank}: {dtype}" for rank, (dtype, _) in enumerate(kinds))
        raise RanksDisagreeError(f"ranks gather tensors of different dtypes: {shown}. Convert them to one dtype first.")
    device = tensor.device
    if device.type == "cpu":
        group, device = agree.channel(group)
    content = flat_bytes(own.to(device))  # backends support few dtypes
    sizes = [math.prod(shape) * tensor.element_size() for _, shape in kinds]
    padded = content.new_zeros(max(sizes))
    padded[: content.numel()] = content
    parts = [torch.empty_like(padded) for _ in kinds]
    if max(sizes):
        dist.all_gather(parts, padded, group=group)
    rows = zip(parts, sizes, kinds, strict=True)
    return [part[:size].view(tensor.dtype).reshape(shape).to(tensor.device) for part, size, (_, shape) in rows]


def _form(value: Any, tensors: list[torch.Tensor]) -> Any:
    """[kind, content] of a value, as JSON; its tensors are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", [str(value.dtype).removeprefix("torch."), list(value.shape)]]
    if isinstance(value, dict):  # a list of pairs: keys may be numbers
        return ["dict", [[key, _form(each, tensors)] for key, each in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__ if type(value) in (list, tuple) else "list", [_form(each, tensors) for each in value]]
    return ["value", value]


def _tensors(form: Any) -> Iterator[tuple[str, list[int]]]:
    kind, content = form
    if kind == "tensor":
        yield content[0], content[1]
    elif kind != "value":
        for each in content:
            yield from _tensors(each[1] if kind == "dict" else each)


def _filled(form: Any, tensors: Iterator[torch.Tensor]) -> Any:
    kind, content = form
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {key: _filled(each, tensors) for key, each in content}
    if kind == "value":
        return content
    made = [_filled(each, tensors) for each in content]
    return tuple(made) if kind == "tuple" else made
