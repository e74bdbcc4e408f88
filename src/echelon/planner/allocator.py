"""Simulates torch's caching allocator for CUDA: the memory that it reserves on a device while tensors come and go.

The allocator never returns a segment, so it reserves more than the peak of all tensors: the holes between blocks, and memory of
one stream, which no other stream can use. Rules: pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp of torch 2.13, "Note
[Interaction with CUDA memory]"; for `expandable_segments`, "ExpandableSegment". The real allocator, when it runs out of memory,
frees segments that are entirely free and tries again; so a training may fit although it would reserve more than the device has.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from dataclasses import dataclass, field

__all__ = ["Allocator", "Block", "expands"]

_MIB = 2**20
_LEAST = 512  # the size of a block is a multiple of this
_SMALL = _MIB  # blocks up to this size have segments of their own, of _SMALL_SEGMENT
_SMALL_SEGMENT, _SEGMENT = 2 * _MIB, 20 * _MIB  # _SEGMENT holds larger blocks below _OWN_SEGMENT
_OWN_SEGMENT, _ROUND = 10 * _MIB, 2 * _MIB


def expands() -> bool:
    """Whether the environment asks for `expandable_segments`."""
    asked = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return re.search(r"expandable_segments\s*:\s*true", asked, re.IGNORECASE) is not None


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment; `before` and `after` are its neighbours in the segment."""

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
    """A stream's pool of small blocks or of large ones.

    Args:
        keys: keys of the free blocks, the smallest first.
        last: the block at the end of an expandable segment.
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
        reserved: bytes taken from the device; never decreases.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.reserved = 0
        self._expandable = expandable
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._next_address = 0

    def take(self, size: int, stream: str) -> Block:
        """Allocate a block of `size` bytes: from the smallest free block that fits, or from a new segment."""
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
        """Free a block, and merge it with its free neighbours."""
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
            del fitting[0]  # the last block can grow, so it counts as larger
        if not fitting:
            return None
        pool.remove(block := pool.free[fitting[0]])
        return block

    def _segment(self, pool: _Pool, size: int) -> Block:
        whole = _SMALL_SEGMENT if pool.is_small else _SEGMENT if size < _OWN_SEGMENT else -(-size // _ROUND) * _ROUND
        return Block(pool, self._more(whole), whole)

    def _grown(self, pool: _Pool, size: int) -> Block:
        """The block at the end of the segment, grown by the pages that it needs."""
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
        """Take `size` bytes from the device and return their address."""
        at = self._next_address
        self._next_address, self.reserved = at + size, self.reserved + size
        return at
