"""Batches in page-locked host memory, which a GPU copies while the program goes on. Copies from other memory are waited for.

With `pin_memory=None`, a loader locks all tensors in host memory that it can, if this process computes on CUDA. Tensors that a
collate function has put on a device already, sparse tensors and subclasses stay as they are; torch's own `pin_memory=True` would
refuse some of these. In a loader with workers, torch's thread does the locking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echelon.world.device import map_tensors

__all__ = ["Lockable", "lockable", "locked", "locks"]


def locks(asked: bool | None) -> bool:
    """Whether a loader locks batches by itself. Asked at each iteration: CUDA may be initialized after the loader is made."""
    return asked is None and torch.cuda.is_initialized()  # unlike `is_available`, this never starts anything


def locked(data: Any) -> Any:
    """The same structure with its tensors in page-locked memory. If it cannot be rebuilt, such as a list with a constructor of
    its own, it is returned unchanged: only time is lost.
    """
    try:
        return map_tensors(data, _lock)
    except (TypeError, RuntimeError):
        return data


def _lock(value: Any) -> Any:
    if type(value) is torch.Tensor:
        plain = value.device.type == "cpu" and value.layout is torch.strided and not value.is_nested
        if plain and 0 in value.stride():  # an expanded tensor cannot be pinned with its strides; others keep theirs
            value = value.contiguous()
        return value.pin_memory() if plain else value
    return value.pin_memory() if not isinstance(value, torch.Tensor) and hasattr(value, "pin_memory") else value


class Lockable:
    """Given to torch's DataLoader in place of a batch, so that its pinning calls `locked`."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def pin_memory(self) -> Lockable:
        return Lockable(locked(self.data))


def lockable(collate: Callable[[Any], Any], samples: Any) -> Lockable:
    """The batch that `collate` makes, as a Lockable."""
    return Lockable(collate(samples))
