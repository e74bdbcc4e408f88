"""Padding, a batch without weight; and the arithmetic of dividing samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Padding", "share"]

T = TypeVar("T")


@dataclass(frozen=True)
class Padding(Generic[T]):
    """A batch that must be computed but has no weight."""

    batch: T


def share(samples: int, part: int, parts: int) -> tuple[int, int]:
    """Start and stop of part `part` of `parts` among `samples`. Sizes differ by one at most, larger parts first."""
    small, larger = divmod(samples, parts)
    start = part * small + min(part, larger)
    return start, start + small + (1 if part < larger else 0)
