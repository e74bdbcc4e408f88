"""Which tensors of a batch have the sequence, and along which dimension: what context parallelism cuts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from echelon.common.errors import ContextParallelError
from echelon.common.numbers import whole
from echelon.parallel.context.sequence_layout import SequenceParts
from echelon.world.device import map_named

__all__ = [
    "IGNORED",
    "SequenceDim",
    "beginning_at",
    "check_sequence_dim",
    "counted",
    "cut_batch",
    "labels_of",
    "named",
    "sequence_dims",
    "size_of",
]

# A dimension of every tensor that has so many; or of those that are named, None for those that stay whole.
SequenceDim = int | Mapping[str, int | None] | None

_LABELS = ("shift_labels", "labels", "targets")
IGNORED = -100


def check_sequence_dim(value: Any) -> SequenceDim:
    """
    Raises:
        UsageError: it is no SequenceDim.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {
            str(name): None if dim is None else whole(f"sequence_dim[{name!r}]", dim, kind=ContextParallelError)
            for name, dim in value.items()
        }
    return whole("sequence_dim", value, kind=ContextParallelError)


def sequence_dims(batch: Any, said: SequenceDim = None) -> dict[str, int]:
    """For each tensor that has the sequence: its name and the dimension. The name is a key, a field, or a number in a tuple.

    Unless `said`, the sequence is dimension 1 of the first tensor of whole numbers with two dimensions or more, or of the first
    one; other tensors have it in dimension 1 where that is as long, and masks (B, 1, T, T) in the rows.

    Raises:
        UsageError: no tensor has it, or one may have it or not.
    """
    tensors = dict(named(batch))
    if isinstance(said, int):
        found = {name: said for name, t in tensors.items() if t.dim() > said}
    elif said is not None:
        if unknown := set(said) - set(tensors):
            raise ContextParallelError(
                f"sequence_dim must name tensors of the batch, {_names(tensors)}, got {sorted(unknown)[0]!r}."
            )
        found = {name: dim for name, dim in said.items() if dim is not None}
        for name, dim in found.items():
            if dim >= tensors[name].dim():
                raise ContextParallelError(f"sequence_dim[{name!r}] must be a dimension of {_shape(name, tensors)}, got {dim}.")
    else:
        found = _guessed(tensors)
    if not found:
        raise ContextParallelError(
            "context parallelism splits sequences, but no tensor of the batch has one: a tensor of shape (rows, length, ...). "
            f"Got {_names(tensors) or type(batch).__name__}. Say Layout(sequence_dim={{name: dimension}}), or train without cp."
        )
    return found


def _guessed(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    several = {name: t for name, t in tensors.items() if t.dim() > 1}
    if not several:
        return {}
    first = next((t for t in several.values() if not t.is_floating_point()), next(iter(several.values())))
    rows, length = first.shape[0], first.shape[1]
    found: dict[str, int] = {}
    for name, t in tensors.items():
        if t.dim() > 1 and t.shape[1] == length:
            found[name] = 1
        elif t.dim() > 3 and t.shape[-2] == length:
            found[name] = t.dim() - 2  # a mask: its rows are the queries
        elif t.dim() == 1 and t.shape[0] == length != rows:
            found[name] = 0  # positions for all rows
        elif length in t.shape and (t.dim() == 1 or length in t.shape[1:]):
            raise ContextParallelError(
                f"context parallelism: the sequence has {length} tokens, and {_shape(name, tensors)} has that many in another "
                "dimension than 1. Say which tensors have the sequence and where, None for those without: "
                f"Layout(sequence_dim={_example(tensors, name)})."
            )
    return found


def cut_batch(batch: Any, dims: Mapping[str, int], parts: SequenceParts) -> Any:
    """The batch with this rank's part of each tensor in `dims`."""
    return map_named(batch, lambda name, t: parts.cut(t, dims[name], _named_length(name, t, dims)) if name in dims else t)


def size_of(batch: Any, dims: Mapping[str, int]) -> tuple[int, int]:
    """Rows and length of the first tensor that has the sequence in dimension 1; of none, 0."""
    return next(((t.shape[0], t.shape[1]) for name, t in named(batch) if dims.get(name) == 1), (0, 0))


def beginning_at(batch: Any, dims: Mapping[str, int], start: int, length: int, fill: Mapping[str, torch.Tensor]) -> Any:
    """So many tokens of each tensor in `dims`, from the same token on; of masks the keys, too.

    Args:
        fill: by name, where labels are to be ignored.
    """

    def take(name: str, t: torch.Tensor) -> torch.Tensor:
        if name not in dims:
            return t
        dim, of_all = dims[name], t.shape[dims[name]]
        t = t.narrow(dim, start, length)
        if dim and dim == t.dim() - 2 and t.shape[-1] == of_all:
            t = t.narrow(-1, start, length)
        return t.masked_fill(fill[name].to(t.device), IGNORED) if name in fill else t

    return map_named(batch, take)


def labels_of(batch: Any, dims: Mapping[str, int]) -> tuple[str, torch.Tensor] | None:
    """Those of the tokens, by their name, or the last tensor of whole numbers."""
    tensors = dict(named(batch))
    numbers = [n for n in dims if n in tensors and not tensors[n].is_floating_point() and tensors[n].dtype is not torch.bool]
    name = next((n for known in _LABELS for n in numbers if n.rpartition(".")[2] == known), numbers[-1] if numbers else None)
    return None if name is None else (name, tensors[name])


def counted(batch: Any, part: Any, dims: Mapping[str, int], size: int) -> float | torch.Tensor:
    """How much of what the whole batch counts is counted in the part: its share of the labels that are not ignored."""
    found, mine = labels_of(batch, dims), labels_of(part, dims)
    if found is None or mine is None:
        return 1 / size
    here, all_ = (mine[1] != IGNORED).sum(), (found[1] != IGNORED).sum()
    if here.device.type == "cpu":
        return int(here) / max(1, int(all_))
    return here.double() / all_.clamp(min=1)


def _named_length(name: str, t: torch.Tensor, dims: Mapping[str, int]) -> str:
    return f"dimension {dims[name]} of {_label(name)}, of shape {tuple(t.shape)},"


def _shape(name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    return f"{_label(name)} of shape {tuple(tensors[name].shape)}"


def _label(name: str) -> str:
    return f"item {name} of the batch" if name.isdigit() else name or "the batch"


def _names(tensors: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(_shape(name, tensors) for name in tensors)


def _example(tensors: Mapping[str, torch.Tensor], doubtful: str) -> str:
    return "{" + ", ".join(f'"{name}": {None if name == doubtful else 1}' for name in tensors) + "}"


def named(data: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by name, in their order."""
    found: list[tuple[str, torch.Tensor]] = []

    def take(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found.append((name, value))
        return value

    map_named(data, take)
    yield from found
