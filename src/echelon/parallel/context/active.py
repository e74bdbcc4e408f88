"""Whether passes go over parts of sequences now, and over which: asked by attention, masks and positions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from echelon.parallel.context.sequence_layout import SequenceParts

__all__ = ["current", "over", "positions", "whole_sequence"]

# Innermost last; None is a pass over whole sequences. Not of one thread: a GPU's backward pass runs in a thread of its own, and
# recomputes there what was computed within one.
_active: list[SequenceParts | None] = []


def current() -> SequenceParts | None:
    """This rank's part of the sequences that go through the module now; None if they are whole."""
    return _active[-1] if _active else None


@contextlib.contextmanager
def over(parts: SequenceParts | None) -> Iterator[None]:
    """Context of passes over these parts, or over whole sequences."""
    _active.append(parts)
    try:
        yield
    finally:
        _active.pop()


def positions(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Where the tokens of `x` stand in their sequence: `torch.arange(x.shape[dim])`, which it is without context parallelism.

    With it, a rank has an early and a late chunk of each sequence. Call it in the module's forward.

    Args:
        x: this rank's tokens, or what was computed of them.
        dim: of the sequence.
    Returns:
        int64 of shape (x.shape[dim],), on the device of x.
    """
    length, parts = x.shape[dim], current()
    if parts is None:
        return torch.arange(length, device=x.device)
    parts.chunk_of_part(length, "echelon.nn.positions")
    return parts.positions(length, x.device)


def whole_sequence(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The whole sequence in its order, from the parts of all context-parallel ranks; `x` itself without them.

    For the keys' side of a mask, where this rank's tokens are the queries: `documents[:, :, None] ==
    echelon.nn.whole_sequence(documents)[:, None, :]`. Gradients go back to the ranks. Collective over them, in a forward pass.
    """
    parts = current()
    if parts is None:
        return x
    parts.chunk_of_part(x.shape[dim], "echelon.nn.whole_sequence")
    return parts.whole(x, dim)
