"""Accumulation windows of uneven micro-batches, for any number of ranks."""

from __future__ import annotations

from typing import Any

from tests.kit.models import batch

# Rows of each micro-batch: [window][micro-batch][rank]. A window shorter than the accumulation can only be the last.
SHAPES = {
    "equal": [[[4, 4], [4, 4]], [[4, 4], [4, 4]]],
    "short last window": [[[4, 4], [4, 4]], [[4, 4]]],
    "uneven micro-batches": [[[4, 4], [1, 1]], [[6, 6], [3, 3]]],
    "ranks with other counts": [[[4, 1], [2, 5]], [[7, 1], [1, 3]]],
    "all at once": [[[4, 2], [3, 5]], [[6, 6], [1, 2]], [[2, 7]]],
}


def windows_of(shape: list[list[list[int]]], ranks: int) -> list[list[list[Any]]]:
    """Batches by window, micro-batch and rank; other numbers of ranks than two repeat the rows given."""
    seed = iter(range(1000))
    return [[[batch(micro[r % 2], next(seed)) for r in range(ranks)] for micro in window] for window in shape]
