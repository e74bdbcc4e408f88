"""The unit of work at the seam between the loop and what a layout made of a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["MicroBatch"]

T = TypeVar("T")


# Not frozen: that would take four times as long to make, in every step.
@dataclass(slots=True)
class MicroBatch(Generic[T]):
    """One forward and one backward pass.

    Args:
        data: a batch as the loader gave it, on the device; or a piece of one.
        weight: what it counts in the mean over the global batch: a number, or a 0-dim tensor on the device.
        is_last: of its window; the update follows.
        is_padding: it stands in for a batch without samples.
    """

    data: T
    weight: Any
    is_last: bool
    is_padding: bool = False
