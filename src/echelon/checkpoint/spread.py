"""Divide the writing of a checkpoint's pieces over the ranks that hold them; all ranks write about equally much.

The time is linear in pieces and ranks, up to logarithms: ranks with equal listings are handled together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from echelon.checkpoint import plain
from echelon.checkpoint.layout import tensors_file

__all__ = ["Piece", "spread"]

# A piece of a tensor: its name, and where it begins in the whole.
Piece = tuple[str, tuple[int, ...]]


def spread(listings: Iterable[list[Any]], of: Sequence[int]) -> tuple[list[bytes], dict[str, Any]]:
    """Assign each piece to one of the ranks that hold it, large pieces first: to the first rank where its values are to be saved,
    otherwise to the rank with least to write so far.

    Args:
        listings: the distinct listings of ranks, as in `Planned.assign`, in the order of the first rank that has each.
        of: by rank, the number of its listing.
    Returns:
        for each rank one bit a piece of its listing, lowest first, set if it writes that piece; and the index of all tensors.
    """
    ranks: list[list[int]] = []
    for rank, kind in enumerate(of):
        if kind == len(ranks):
            ranks.append([])
        ranks[kind].append(rank)
    # By piece: its form, and the listings that have it, each with the piece's position there. Equal forms are kept once.
    held: dict[Piece, tuple[_Form, list[int]]] = {}
    forms: dict[Any, _Form] = {}
    names: dict[str, str] = {}
    leading = set()
    lengths = []
    for kind, listing in enumerate(listings):
        lengths.append(len(listing))
        for at, (name, offsets, sizes, dtype, shape, leads) in enumerate(listing):
            piece = (names.setdefault(name, name), tuple(offsets))
            if (known := held.get(piece)) is None:
                key = (dtype, *sizes, *shape)
                if (form := forms.get(key)) is None:
                    form = forms[key] = _Form(sizes, dtype, shape, _bytes(dtype, sizes))
                held[piece] = (form, [kind, at])
            else:
                known[1].extend((kind, at))
            if leads:
                leading.add(name)
    writes = [bytearray(-(-lengths[kind] // 8)) for kind in of]
    files = [tensors_file(rank) for rank in range(len(of))]
    index: dict[str, Any] = {}
    least = _Least(ranks, len(of))
    for piece, (form, places) in sorted(held.items(), key=lambda each: (-each[1][0].bytes, each[0])):
        kinds = tuple(places[::2])
        writer = least.take(kinds, form.bytes, ranks[kinds[0]][0] if piece[0] in leading else None)
        at = places[2 * kinds.index(of[writer]) + 1]
        writes[writer][at // 8] |= 1 << at % 8
        entry = index.setdefault(piece[0], {"dtype": form.dtype, "shape": form.shape, "pieces": []})
        entry["pieces"].append((piece[1], form.sizes, files[writer]))
    return [bytes(each) for each in writes], dict(sorted(index.items()))


class _Form(NamedTuple):
    sizes: list[int]
    dtype: str
    shape: list[int]
    bytes: int


class _Least:
    """Finds the rank with least to write among those with certain listings; of equal ones the first.

    Args:
        ranks: by listing, the ranks that have it.
    """

    def __init__(self, ranks: list[list[int]], size: int) -> None:
        self._ranks, self._load = ranks, [0] * size
        # By listings, a heap of their ranks, each with its load when it was last looked at: never more than its present load.
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def take(self, kinds: tuple[int, ...], size: int, writer: int | None) -> int:
        """Choose the rank that writes `size` bytes, and add to its load: `writer`, or the rank with least to write."""
        if writer is None:
            writer = self._least(kinds)
        self._load[writer] += size
        return writer

    def _least(self, kinds: tuple[int, ...]) -> int:
        if len(kinds) == 1 and len(self._ranks[kinds[0]]) == 1:
            return self._ranks[kinds[0]][0]
        if kinds not in self._heaps:
            heap = [(self._load[rank], rank) for kind in kinds for rank in self._ranks[kind]]
            heapq.heapify(heap)
            self._heaps[kinds] = heap
        heap = self._heaps[kinds]
        while heap[0][0] < (load := self._load[rank := heap[0][1]]):
            heapq.heapreplace(heap, (load, rank))
        return heap[0][1]


def _bytes(dtype: str, sizes: list[int]) -> int:
    size = plain.dtype_of(dtype).itemsize
    for dim in sizes:
        size *= dim
    return size
