"""A batch that weighs nothing, and the arithmetic of dividing samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Padding", "share"]

T = TypeVar("T")


@dataclass(frozen=True)
class Padding(Generic[T]):
    """A batch that must be computed but weighs nothing."""

    batch: T


def share(samples: int, part: int, parts: int) -> tuple[int, int]:
    """Where part `part` of `parts` begins and ends among `samples`: sizes differ by one at most, larger ones first."""
    small, larger = divmod(samples, parts)
    start = part * small + min(part, larger)
    return start, start + small + (1 if part < larger else 0)
