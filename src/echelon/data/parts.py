"""A batch that weighs nothing, a batch in pieces, and the arithmetic of dividing samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

__all__ = ["Padding", "Pieces", "joined", "share"]

T = TypeVar("T")


@dataclass(frozen=True)
class Padding(Generic[T]):
    """A batch that must be computed but weighs nothing."""

    batch: T


class Pieces(list[Any]):
    """A micro-batch in pieces that are computed one after the other: batches, and `Padding` where there are too few samples.

    Every rank has as many pieces, since forward passes may be collective.
    """


def share(samples: int, part: int, parts: int) -> tuple[int, int]:
    """Where part `part` of `parts` begins and ends among `samples`: sizes differ by one at most, larger ones first."""
    small, larger = divmod(samples, parts)
    start = part * small + min(part, larger)
    return start, start + small + (1 if part < larger else 0)


def joined(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """What belongs to a micro-batch, of what belongs to its pieces: batches, or outputs. Without a graph.

    Tensors and lists of samples are put one behind the other, field by field; numbers are means. What cannot be put together,
    such as tensors that were padded to other lengths, is a list of the pieces' values.
    """
    if len(values) == 1:
        return values[0]
    first = values[0]
    if any(type(each) is not type(first) for each in values):
        return list(values)
    if isinstance(first, torch.Tensor):
        return _joined_tensors(values, weights)
    if isinstance(first, float) and not isinstance(first, bool):
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        fields = {name: joined([getattr(each, name) for each in values], weights) for name in names}
        return dataclasses.replace(first, **fields)  # type: ignore[type-var]
    if isinstance(first, Mapping) and all(each.keys() == first.keys() for each in values):
        return {name: joined([each[name] for each in values], weights) for name in first}
    if isinstance(first, (list, tuple)) and not _lists_samples(values):
        fields_of = [joined(field, weights) for field in zip(*values, strict=True)]
        return type(first)(*fields_of) if hasattr(first, "_fields") else type(first)(fields_of)
    if isinstance(first, list):
        return [sample for each in values for sample in each]
    same = isinstance(first, (str, bytes, int, type(None))) and all(each == first for each in values)
    return first if same else list(values)


def _joined_tensors(values: Sequence[torch.Tensor], weights: Sequence[float]) -> Any:
    first = values[0]
    if first.dim() == 0 and first.is_floating_point():
        return sum(value.detach() * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    if first.dim() and all(each.shape[1:] == first.shape[1:] for each in values):
        return torch.cat([each.detach() for each in values])
    return first if all(torch.equal(each, first) for each in values) else list(values)


def _lists_samples(values: Sequence[Any]) -> bool:
    """Whether these are lists of samples, rather than of a batch's fields, whose tensors have as many rows as each other."""
    if len({len(each) for each in values}) > 1 or any(isinstance(item, (str, bytes)) for item in values[0]):
        return True
    return any(len({item.shape[:1] for item in each if isinstance(item, torch.Tensor)}) > 1 for each in values)
