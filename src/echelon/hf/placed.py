"""Where the tensors of a model lie in another program's files, if not one by one under the same names.

An expert's matrix may lie in a file of its own and be a slice of a stacked parameter; a fused matrix may become three.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

__all__ = ["Block", "Computed", "Held", "Layout", "Lays", "Piece", "chunks", "joined", "stacked"]


class Held(NamedTuple):
    """A tensor of a file: its type, by torch's name, and its shape."""

    dtype: str
    shape: list[int]


class Piece(NamedTuple):
    """A part of a tensor that lies in one tensor of a file, row by row.

    Args:
        offsets, sizes: where in the tensor, and how much.
        source: the name in the file.
        viewed: the source's shape, with as many dimensions as the tensor has.
        begins: where in the source the piece begins.
    """

    offsets: list[int]
    sizes: list[int]
    source: str
    viewed: list[int]
    begins: list[int]


@dataclass(frozen=True)
class Block:
    """A tensor as the pieces that it consists of."""

    shape: list[int]
    pieces: list[Piece]

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> Block:
        begins = [0] * len(shape)
        return cls(list(shape), [Piece(begins, list(shape), name, list(shape), begins)])


class Computed(NamedTuple):
    """A tensor that has to be computed from whole ones of the files: `value(read)` gives it, `read(name)` one of a file."""

    dtype: str
    shape: list[int]
    value: Callable[[Callable[[str], torch.Tensor]], torch.Tensor]


@dataclass
class Layout:
    """
    Attributes:
        blocks, computed: by the names of the model's state.
        unused: names in the files that the model has no use for, and that are no mistake.
        kept: names of the model's state that no file is asked for.
    """

    blocks: dict[str, Block] = field(default_factory=dict)
    computed: dict[str, Computed] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)


# From what the files hold, and the shapes of the model's state.
Lays = Callable[[Mapping[str, Held], Mapping[str, list[int]]], Layout]


def stacked(blocks: Sequence[Block], dim: int) -> Block:
    """As torch.stack."""
    pieces = [
        Piece(_with(p.offsets, dim, at), _with(p.sizes, dim, 1), p.source, _with(p.viewed, dim, 1), _with(p.begins, dim, 0))
        for at, block in enumerate(blocks)
        for p in block.pieces
    ]
    return Block(_with(blocks[0].shape, dim, len(blocks)), pieces)


def joined(blocks: Sequence[Block], dim: int) -> Block:
    """As torch.cat."""
    starts = itertools.accumulate((block.shape[dim] for block in blocks), initial=0)
    pieces = [
        p._replace(offsets=_moved(p.offsets, dim, start))
        for block, start in zip(blocks, starts, strict=False)
        for p in block.pieces
    ]
    shape = list(blocks[0].shape)
    shape[dim] = sum(block.shape[dim] for block in blocks)
    return Block(shape, pieces)


def chunks(block: Block, count: int, dim: int) -> list[Block]:
    """As torch.chunk, for what divides evenly."""
    size, rest = divmod(block.shape[dim], count)
    if rest:
        raise ValueError(f"{block.shape[dim]} is not {count} equal parts")
    return [_cut(block, dim, at * size, size) for at in range(count)]


def _cut(block: Block, dim: int, begin: int, length: int) -> Block:
    pieces = []
    for p in block.pieces:
        first, last = max(p.offsets[dim], begin), min(p.offsets[dim] + p.sizes[dim], begin + length)
        if first < last:
            inside = first - p.offsets[dim]
            offsets, begins = _moved(p.offsets, dim, inside - begin), _moved(p.begins, dim, inside)
            sizes = [*p.sizes[:dim], last - first, *p.sizes[dim + 1 :]]
            pieces.append(Piece(offsets, sizes, p.source, p.viewed, begins))
    return Block([*block.shape[:dim], length, *block.shape[dim + 1 :]], pieces)


def _with(numbers: list[int], dim: int, number: int) -> list[int]:
    return [*numbers[:dim], number, *numbers[dim:]]


def _moved(numbers: list[int], dim: int, by: int) -> list[int]:
    return [n + by if d == dim else n for d, n in enumerate(numbers)]
