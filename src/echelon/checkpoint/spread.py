"""Which rank writes which piece of a checkpoint's tensors: each piece one of those that hold it, all about equally much.

Linear in the pieces and the ranks, but for logarithms: ranks whose listings are equal are looked at together.
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
    """Of equal pieces, one is written; large ones first, each by the rank that has least to write so far, or else the first.

    Args:
        listings: what ranks could write, as `Planned.assign` says: the different ones, by the first rank that has it.
        of: by rank which of the listings it has.
    Returns:
        for each rank a bit for each piece of its listing, lowest first, set if it is to write that piece; and the index of all.
    """
    ranks: list[list[int]] = []
    for rank, kind in enumerate(of):
        if kind == len(ranks):
            ranks.append([])
        ranks[kind].append(rank)
    # By piece: what it is, and the listings that have it, each with the place there. What pieces share is kept once.
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
    """The rank that has least to write among those with certain listings; of equals the first.

    Args:
        ranks: by listing, the ranks that have it.
    """

    def __init__(self, ranks: list[list[int]], size: int) -> None:
        self._ranks, self._load = ranks, [0] * size
        # By listings, their ranks with what each had to write when it was last looked at: never more than now.
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def take(self, kinds: tuple[int, ...], size: int, writer: int | None) -> int:
        """Who writes so many bytes: `writer`, or the one with least."""
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
