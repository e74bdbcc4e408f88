"""What a run leaves for the judge: values by parameter name, micro-batches as they were, and how they are put together."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

__all__ = ["Micro", "NotJoinable", "digest", "join", "on_host", "widened"]


@dataclass
class Micro:
    """A micro-batch as one rank worked on it.

    Args:
        data: on the host.
        weight: what it counts; 0 is padding, or a rank for which another one speaks.
        loss: its mean loss.
        stream: the state of the random stream before its forward pass, if the pass drew from it.
        epoch: of the loader.
    """

    data: Any
    weight: float
    loss: float
    stream: torch.Tensor | None
    epoch: int


class NotJoinable(Exception):
    """Batches whose parts do not fit together: of other kinds, or padded to other widths."""


def join(batches: list[Any]) -> Any:
    """Batches of one structure as one: tensors along their first dimension.

    Raises:
        NotJoinable: they do not fit together.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if any(type(b) is not type(first) for b in batches):
        raise NotJoinable(f"a {type(first).__name__} and something else")
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            if any(not torch.equal(b, first) for b in batches):
                raise NotJoinable("scalars that differ")
            return first
        if any(b.shape[1:] != first.shape[1:] for b in batches):
            raise NotJoinable(f"shapes {sorted({tuple(b.shape[1:]) for b in batches})}")
        return torch.cat(batches)
    if isinstance(first, Mapping):
        if any(b.keys() != first.keys() for b in batches):
            raise NotJoinable("other keys")
        joined = {k: join([b[k] for b in batches]) for k in first}
        return type(first)(joined) if type(first) is not dict else joined  # type: ignore[call-arg]
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join(list(parts)) for parts in zip(*batches, strict=True)))
    if isinstance(first, (tuple, list)):
        if first and not any(isinstance(v, (torch.Tensor, Mapping, tuple, list)) for v in first):
            return type(first)(v for b in batches for v in b)  # one value per sample, such as its text
        if any(len(b) != len(first) for b in batches):
            raise NotJoinable("other lengths")
        return type(first)(join(list(parts)) for parts in zip(*batches, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(**{f.name: join([getattr(b, f.name) for b in batches]) for f in fields(first)})
    if any(b != first for b in batches):
        raise NotJoinable(f"values {first!r} and others")
    return first


def _mapped(data: Any, change: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        mapped = {k: _mapped(v, change) for k, v in data.items()}
        return type(data)(mapped) if type(data) is not dict else mapped  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_mapped(v, change) for v in data))
    if isinstance(data, (tuple, list)):
        return type(data)(_mapped(v, change) for v in data)
    if is_dataclass(data) and not isinstance(data, type):
        return type(data)(**{f.name: _mapped(getattr(data, f.name), change) for f in fields(data)})
    return data


def on_host(data: Any) -> Any:
    """A copy of a batch that nobody changes any more."""
    return _mapped(data, lambda t: t.detach().cpu().clone())


def widened(data: Any, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """A batch with its floating-point tensors in `dtype`, on `device`."""
    return _mapped(data, lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None))


def digest(data: Any) -> int:
    """A checksum of all tensors in a batch; of text and numbers their representation."""
    value = 0

    def take(t: torch.Tensor) -> torch.Tensor:
        nonlocal value
        raw = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        value = zlib.crc32(raw.numpy().tobytes(), zlib.crc32(repr((tuple(t.shape), t.dtype)).encode(), value))
        return t

    rest = _mapped(data, take)
    if isinstance(rest, (str, int, float)):
        value = zlib.crc32(repr(rest).encode(), value)
    return value
