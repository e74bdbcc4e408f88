"""What CUDA's caching allocator of torch takes from a device for the tensors that come and go: the memory that it has reserved.

It never gives back a segment, so what is reserved is more than what tensors have at their fullest moment: by the holes between
blocks, and by what a stream has had, which no other stream gets. Rules: pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp of
torch 2.13, "Note [Interaction with CUDA memory]"; of `expandable_segments`, "ExpandableSegment". An allocator that runs out
of memory frees what is free as a whole, and tries again; so a training may fit that would reserve more.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from dataclasses import dataclass, field

__all__ = ["Allocator", "Block", "expands"]

_MIB = 2**20
_LEAST = 512  # bytes of which each block is a multiple
_SMALL = _MIB  # what is at most so large has segments of its own, of _SMALL_SEGMENT
_SMALL_SEGMENT, _SEGMENT = 2 * _MIB, 20 * _MIB  # the latter is for what is below _OWN_SEGMENT
_OWN_SEGMENT, _ROUND = 10 * _MIB, 2 * _MIB


def expands() -> bool:
    """Whether the environment asks for `expandable_segments`."""
    asked = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return re.search(r"expandable_segments\s*:\s*true", asked, re.IGNORECASE) is not None


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment; `before` and `after` are its neighbours within."""

    pool: _Pool
    address: int
    size: int
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


@dataclass
class _Pool:
    """Of a stream, for small blocks or for large ones.

    Args:
        free: blocks, the smallest first.
        last: of a segment that expands, the block at its end.
    """

    is_small: bool
    keys: list[tuple[int, int]] = field(default_factory=list)
    free: dict[tuple[int, int], Block] = field(default_factory=dict)
    last: Block | None = None

    def add(self, block: Block) -> None:
        block.is_free = True
        insort(self.keys, block.key)
        self.free[block.key] = block

    def remove(self, block: Block) -> None:
        block.is_free = False
        del self.keys[bisect_left(self.keys, block.key)], self.free[block.key]


class Allocator:
    """
    Args:
        expandable: each pool has one segment, which grows at its end.
    Attributes:
        reserved: bytes that it has taken from the device. They never become fewer.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.reserved = 0
        self._expandable = expandable
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._next_address = 0

    def take(self, size: int, stream: str) -> Block:
        """A block of so many bytes: the smallest that is free, or a new segment's."""
        size = max(_LEAST, -(-size // _LEAST) * _LEAST)
        is_small = size <= _SMALL
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small))
        block = self._best(pool, size) or (self._grown(pool, size) if self._expandable else self._segment(pool, size))
        rest = block.size - size
        if rest >= _LEAST if is_small or self._expandable else rest > _SMALL:
            other = Block(pool, block.address + size, rest, before=block, after=block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            if pool.last is block:
                pool.last = other
            pool.add(other)
        return block

    def give(self, block: Block) -> None:
        """It is free, and one with its neighbours that are."""
        pool = block.pool
        if block.after is not None and block.after.is_free:
            pool.remove(block.after)
            self._join(block, block.after)
        if block.before is not None and block.before.is_free:
            pool.remove(block.before)
            self._join(block.before, block)
            block = block.before
        pool.add(block)

    def _join(self, block: Block, after: Block) -> None:
        block.size, block.after = block.size + after.size, after.after
        if after.after is not None:
            after.after.before = block
        if block.pool.last is after:
            block.pool.last = block

    def _best(self, pool: _Pool, size: int) -> Block | None:
        at = bisect_left(pool.keys, (size, -1))
        fitting = pool.keys[at : at + 2]
        if len(fitting) == 2 and pool.free[fitting[0]] is pool.last:
            del fitting[0]  # it counts as large as it can grow
        if not fitting:
            return None
        pool.remove(block := pool.free[fitting[0]])
        return block

    def _segment(self, pool: _Pool, size: int) -> Block:
        whole = _SMALL_SEGMENT if pool.is_small else _SEGMENT if size < _OWN_SEGMENT else -(-size // _ROUND) * _ROUND
        return Block(pool, self._more(whole), whole)

    def _grown(self, pool: _Pool, size: int) -> Block:
        """The end of the segment, with as many more pages as it needs."""
        page, last = _SMALL_SEGMENT if pool.is_small else _SEGMENT, pool.last
        if last is not None and last.is_free:
            pool.remove(last)
        else:
            last = Block(pool, last.address + last.size if last else self._more(0), 0, before=last)
            if last.before is not None:
                last.before.after = last
        more = -(-(size - last.size) // page) * page
        self._more(more)
        last.size += more
        pool.last = last
        return last

    def _more(self, size: int) -> int:
        """Takes it from the device; gives its address."""
        at = self._next_address
        self._next_address, self.reserved = at + size, self.reserved + size
        return at
