"""What torch's operators read, write and compute, and collectives: plain numbers from which times are estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from echelon.common.errors import PlanError
from echelon.loop.records.utilization import allows_tf32
from echelon.planner.flops import flops_of
from echelon.planner.pretended import is_plain
from echelon.planner.recurrent import steps_of
from echelon.planner.values import changed_by

__all__ = ["COPY_IN", "Collective", "Operator", "Step", "operator_of", "tensors_in"]

aten = torch.ops.aten

COPY_IN = "fsdp::all_gather_copy_in"


@dataclass(frozen=True, slots=True)
class Operator:
    """
    Args:
        name: torch's name, such as aten::mm.
        moment: forward, backward or optimizer.
        reads, writes: numbers of the storages.
        size: bytes read and written.
        kind: "product", "attention", or "" for an operator that only moves memory.
        flops: of products and attention, in `dtype`. Excludes the masked half of causal attention, which torch counts.
        shape: of a product: (batch, m, n, k), if known from its name; of attention: (batch, queries, keys, head dim), with half
            the keys if it is causal.
        is_repeated: recomputed, for activation checkpointing.
        host: bytes that go over the link between the device and its host's memory.
        in_turn: number of its kernels that wait for each other.
    """

    name: str
    moment: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    size: int
    kind: str = ""
    flops: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    is_repeated: bool = False
    host: int = 0
    in_turn: int = 1


@dataclass(frozen=True, slots=True)
class Collective:
    """
    Args:
        kind: all-gather, reduce-scatter, all-reduce, ...
        size: bytes, counted as in `Traced.message`.
        ranks: the world's ranks that take part; for a message between two ranks, those of their group.
        peer: the rank to which this rank sends, or from which it receives.
    """

    kind: str
    moment: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    size: int
    ranks: tuple[int, ...]
    peer: int | None = None


Step = Operator | Collective


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if is_plain(type(value)):
            if value.layout is not torch.strided:
                raise PlanError(
                    f"tensors must be dense to be planned, got one of shape {tuple(value.shape)} and layout {value.layout}. If "
                    "it is a gradient, give its embedding sparse=False: layouts and NCCL do not send sparse ones either."
                )
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


_FREE = ("empty", "new_empty", "_local_scalar_dense", "resize_", "set_", "is_", "sym_", "prim::")
_ROWS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather"}  # these read only as much as they return
_OVERWRITE = ("copy_", "zero_", "fill_")


def operator_of(
    op: Any, made: Any, args: Any, kwargs: Any, moment: str, number: Callable[[torch.Tensor], int], is_repeated: bool
) -> Operator | None:
    """The step of an operator; None for an operator that takes no time: views, and allocations without a write.

    Args:
        number: returns the number of a tensor's storage.
    """
    name = op._schema.name
    if name.partition("::")[2].startswith(_FREE):
        return None
    if name == COPY_IN:  # its schema does not show that it fills a buffer
        filled, *_ = tensors_in(made)
        moved = 2 * sum(map(_size, tensors_in(args[0])))
        return Operator(name, moment, tuple(map(number, tensors_in(args[0]))), (number(filled),), moved)
    changed = [tensor for tensor in changed_by(op, args, kwargs) if is_plain(type(tensor))]
    given = list(tensors_in((args, tuple(kwargs.values()))))
    results = list(tensors_in(made))
    inside = {number(t) for t in given}
    outputs = {number(t) for t in results}
    if not changed and outputs <= inside:
        return None
    written = {number(t) for t in changed} | (outputs - inside)
    if name in _ROWS:
        size = 2 * sum(map(_size, results))
    else:
        only_written = {id(t) for t in changed} if name.endswith(_OVERWRITE) or "out" in kwargs else set()
        size = sum(_size(t) for t in given if id(t) not in only_written)
        size += sum(map(_size, changed)) + sum(_size(t) for t in results if number(t) not in inside)
    kind, flops, dtype, shape = _computes(op, made, args, kwargs)
    in_turn, of_one = steps_of(op, args)
    return Operator(
        name, moment, tuple(inside), tuple(written), size, kind, flops, dtype, of_one or shape, is_repeated, in_turn=in_turn
    )


def _size(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())  # an expanded tensor's is smaller


def _computes(op: Any, made: Any, args: Any, kwargs: Any) -> tuple[str, int, str, tuple[int, ...]]:
    counted = flops_of(op, made, args, kwargs)
    if counted is None:
        return "", 0, "", ()
    first = next(tensors_in(args))
    dtype = "float8" if first.dtype.itemsize == 1 and first.is_floating_point() else str(first.dtype).removeprefix("torch.")
    if dtype == "float32" and allows_tf32():
        dtype = "tf32"
    packet = op.overloadpacket
    if "attention" in packet.__name__:
        names = [each.name for each in op._schema.arguments]
        at = names.index("is_causal") if "is_causal" in names else len(args)
        is_causal = args[at] if at < len(args) else kwargs.get("is_causal", False)
        half = 2 if is_causal else 1
        if packet.__name__.startswith(("_flash_", "_efficient_")):  # in these, the sequence comes before the heads, or is packed
            return "attention", counted // half, dtype, ()
        query, key = (args[names.index(each)] for each in ("query", "key"))
        shape = (query.shape[0] * query.shape[1], query.shape[2], key.shape[2] // half, query.shape[3])
        return "attention", counted // half, dtype, shape
    if packet is aten._grouped_mm:
        return "product", counted, dtype, _of_groups(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
    if packet in _LEFT_AT:
        left, right = args[_LEFT_AT[packet]], args[_LEFT_AT[packet] + 1]
        batch = left.shape[0] if left.dim() == 3 else 1
        return "product", counted, dtype, (batch, left.shape[-2], right.shape[-1], left.shape[-1])
    return "product", counted, dtype, ()


def _of_groups(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None) -> tuple[int, ...]:
    """The shape of a grouped product, as if all groups had equally many rows. Groups split the rows of the left side; for a
    weight's gradient, they split the dim that is summed over.
    """
    groups = len(ends) if ends is not None else len(left)
    rows = left.shape[-2] // groups if left.dim() == 2 and right.dim() == 3 else left.shape[-2]
    inner = left.shape[-1] // groups if left.dim() == right.dim() == 2 else left.shape[-1]
    return groups, rows, right.shape[-1], inner


_LEFT_AT = {aten.mm: 0, aten._scaled_mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
