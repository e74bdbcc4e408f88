"""What an operator of torch reads, writes and computes; and collectives. Plain numbers, of which a time can be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from echelon.planner.pretended import is_plain
from echelon.planner.values import changed_by

__all__ = ["COPY_IN", "Collective", "Operator", "Step", "flops_of", "operator_of", "tensors_in"]

aten = torch.ops.aten

COPY_IN = "fsdp::all_gather_copy_in"


@dataclass(frozen=True, slots=True)
class Operator:
    """
    Args:
        name: as torch has it: aten::mm.
        moment: forward, backward or optimizer.
        reads, writes: numbers of storages.
        size: bytes of these together.
        kind: "product", "attention", or "" for what only moves memory.
        flops: of products and attention, in `dtype`; a causal mask's other half is not computed, though it is counted by torch.
        shape: of a product: (batch, m, n, k), if its name says it; of attention (batch, queries, keys, head), of a causal mask
            with half the keys.
        is_repeated: computed again, for activation checkpointing.
        host: bytes that go over the link between the device and its host's memory.
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


@dataclass(frozen=True, slots=True)
class Collective:
    """
    Args:
        kind: all-gather, reduce-scatter, all-reduce, ...
        size: bytes, as in `Traced.message`.
        ranks: that take part, of the world; of what one rank sends to another, those of their group.
        peer: of these, to which this rank sends, or from which it receives.
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
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


_FREE = ("empty", "new_empty", "_local_scalar_dense", "resize_", "set_", "is_", "sym_", "prim::")
_ROWS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather"}  # they read what they give, no more
_OVERWRITE = ("copy_", "zero_", "fill_")


def operator_of(
    op: Any, made: Any, args: Any, kwargs: Any, moment: str, number: Callable[[torch.Tensor], int], is_repeated: bool
) -> Operator | None:
    """None for one that takes no time: views, and memory that nothing is written to.

    Args:
        number: of a tensor's storage.
    """
    name = op._schema.name
    if name.partition("::")[2].startswith(_FREE):
        return None
    if name == COPY_IN:  # its schema does not say that it fills a buffer
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
    return Operator(name, moment, tuple(inside), tuple(written), size, kind, flops, dtype, shape, is_repeated)


def _size(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())  # an expanded one has less


def _computes(op: Any, made: Any, args: Any, kwargs: Any) -> tuple[str, int, str, tuple[int, ...]]:
    counted = flops_of(op, made, args, kwargs)
    if counted is None:
        return "", 0, "", ()
    first = next(tensors_in(args))
    dtype = "float8" if first.dtype.itemsize == 1 and first.is_floating_point() else str(first.dtype).removeprefix("torch.")
    if dtype == "float32" and _allows_tf32():
        dtype = "tf32"
    packet = op.overloadpacket
    if "attention" in packet.__name__:
        names = [each.name for each in op._schema.arguments]
        at = names.index("is_causal") if "is_causal" in names else len(args)
        is_causal = args[at] if at < len(args) else kwargs.get("is_causal", False)
        half = 2 if is_causal else 1
        if packet.__name__.startswith(("_flash_", "_efficient_")):  # these have queries before heads, or none of their own
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
    """Of a product in groups of rows: as if all had equally many. The rows are those of the left side, or, of a weight's
    gradient, what is summed over.
    """
    groups = len(ends) if ends is not None else len(left)
    rows = left.shape[-2] // groups if left.dim() == 2 and right.dim() == 3 else left.shape[-2]
    inner = left.shape[-1] // groups if left.dim() == right.dim() == 2 else left.shape[-1]
    return groups, rows, right.shape[-1], inner


_LEFT_AT = {aten.mm: 0, aten._scaled_mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}


def _allows_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the other of torch's two settings was used
        return getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") == "tf32"


def flops_of(op: Any, made: Any, args: Any, kwargs: Any) -> int | None:
    """Of a product or of attention; None of what is neither. An operator of a script's own is told to torch by
    `register_flop_formula`, and is attention if its name says so."""
    count = _FLOPS.get(op.overloadpacket) or flop_registry.get(op.overloadpacket)
    return None if count is None else int(count(*args, **kwargs, out_val=made))


def _attention(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _grouped(rows: Any, other: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Rows by the matrices of their groups; or, of a weight's gradient, both sides by rows."""
    return int(2 * rows.shape[0] * rows.shape[1] * other.shape[-1])


# torch's formulas do not know grouped products, nor the CPU's kernel of attention. As theirs do, these count the whole square of
# a causal mask.
_FLOPS: dict[Any, Any] = {
    aten._grouped_mm: _grouped,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
