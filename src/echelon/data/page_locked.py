"""Batches in page-locked host memory, which a GPU copies while the program goes on; of other memory each copy is waited for.

A loader that is not told locks what it can where this process computes on CUDA: tensors in host memory. What a collate function
has put on a device already, sparse tensors and subclasses stay as they are; torch's own `pin_memory=True` would refuse some. In a
loader with workers torch's thread does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echelon.world.device import map_tensors

__all__ = ["Lockable", "Locking", "locked", "locks"]


def locks(asked: bool | None) -> bool:
    """Whether a loader locks what it can. Asked with each iteration: CUDA may begin after the loader is made."""
    return asked is None and torch.cuda.is_initialized()  # which, unlike `is_available`, never starts anything


def locked(data: Any) -> Any:
    """The same structure with its tensors in page-locked memory; as it is where that cannot be made, as of a list with a
    constructor of its own: only time is lost.
    """
    try:
        return map_tensors(data, _lock)
    except (TypeError, RuntimeError):
        return data


def _lock(value: Any) -> Any:
    if type(value) is torch.Tensor:
        plain = value.device.type == "cpu" and value.layout is torch.strided and not value.is_nested
        if plain and 0 in value.stride():  # what is expanded cannot be copied into its like; other layouts are kept
            value = value.contiguous()
        return value.pin_memory() if plain else value
    return value.pin_memory() if not isinstance(value, torch.Tensor) and hasattr(value, "pin_memory") else value


class Lockable:
    """What torch's DataLoader is given in place of a batch, so that `locked` is what its pinning does."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def pin_memory(self) -> Lockable:
        return Lockable(locked(self.data))


class Locking:
    """A collate function whose batches are Lockable. A class, since it is sent to workers."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Lockable:
        return Lockable(self._collate(samples))
