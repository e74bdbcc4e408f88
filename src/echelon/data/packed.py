"""Documents of tokens packed into rows of one length, so that no computation goes into padding.

A row's tokens are computed when the row is read, so a Loader shuffles, divides and resumes rows like any samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from echelon.common.arguments import flags
from echelon.common.errors import DatasetError, require
from echelon.common.numbers import number, whole
from echelon.data.tokens import Tokens

__all__ = ["IGNORED", "Packed", "Row", "cu_seqlens"]

# The target of a token without one; `torch.nn.functional.cross_entropy` ignores it by default.
IGNORED = -100
_AT_ONCE = 1 << 20  # offsets that are checked together


class Row(NamedTuple):
    """One row; each tensor has shape (length,). A batch of rows is a Row of tensors (rows, length).

    Attributes:
        inputs: tokens, int64.
        targets: for each token the next one in its document; `IGNORED` at a document's end and in padding.
        documents: number of each token's document within the row, 0, 1, ..., int32; -1 in padding. Attention is allowed between
            tokens of equal number.
        positions: position of each token in its document, int32; in a document that began in an earlier row, counting goes on.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor


class Packed(Dataset[Row]):
    """Rows of `length` tokens; every token is an input exactly once in an epoch.

    Args:
        documents: `Tokens`, or a list of documents, which is then kept in memory.
        length: tokens per row.
        cut: True concatenates the documents and cuts when a row is full, so that only the last row has padding. False begins a
            new row rather than cut a document, and pads; only a document longer than a row is cut, into full rows and a rest.
        across: use the next document's first token as the target of a document's last token, as if there were no boundaries.
        pad: the token in padding; it is never a target.
    Attributes:
        fill: share of places that hold a token, 0 .. 1.
    Raises:
        UsageError: no tokens, or a length below 1.
        DataError: a file whose documents are not in rising order.
    """

    def __init__(
        self,
        documents: Tokens | Sequence[npt.ArrayLike],
        length: int,
        *,
        cut: bool = True,
        across: bool = False,
        pad: int = 0,
    ) -> None:
        number("length", length, "at least 1 token", lambda found: found >= 1, kind=DatasetError)
        self.length, self.across, self.pad = (
            whole("length", length, kind=DatasetError),
            across,
            whole("pad", pad, kind=DatasetError),
        )
        flags(cut=cut, across=across, kind=DatasetError)
        self.tokens = documents if isinstance(documents, Tokens) else Tokens.of(documents)
        require(len(self.tokens) > 0, "documents", "at least 1 token in all", len(self.tokens), kind=DatasetError)
        if not _rise(self.tokens.offsets):
            raise self.tokens.changed()
        # Where rows begin; None if a row begins every `length` tokens.
        self._starts = None if cut else _row_starts(np.asarray(self.tokens.offsets), self.length)

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.length) if self._starts is None else len(self._starts) - 1

    @property
    def fill(self) -> float:
        return len(self.tokens) / (len(self) * self.length)

    def _bounds(self, row: int) -> tuple[int, int]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} is out of range for {len(self)} rows")
        row %= len(self)
        if self._starts is None:
            return row * self.length, min((row + 1) * self.length, len(self.tokens))
        return int(self._starts[row]), int(self._starts[row + 1])

    def __getitem__(self, row: int) -> Row:
        start, stop = self._bounds(row)
        count, offsets = stop - start, self.tokens.offsets
        following = np.empty(self.length + 1, dtype=np.int64)
        read = self.tokens.data[start : min(stop + 1, len(self.tokens))]
        following[: len(read)] = read
        following[count + 1 :] = self.pad
        targets = following[1:].copy()
        targets[count if len(read) > count else count - 1 :] = IGNORED
        following[count:] = self.pad
        # The documents that have a token in this row. Empty documents begin where the next one does; `unique` drops them.
        first = int(np.searchsorted(offsets, start, side="right")) - 1
        last = int(np.searchsorted(offsets, stop, side="left"))
        bounds = np.unique(np.asarray(offsets[first : last + 1]))
        edges = np.clip(bounds, start, stop) - start
        sizes = np.diff(edges)
        documents = np.full(self.length, -1, dtype=np.int32)
        documents[:count] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        positions = np.zeros(self.length, dtype=np.int32)
        positions[:count] = np.arange(start, stop) - np.repeat(bounds[:-1], sizes)
        if not self.across:
            ends = bounds[1:] - start - 1
            targets[ends[ends < count]] = IGNORED
        return Row(*map(torch.from_numpy, (following[:-1], targets, documents, positions)))

    def __getitems__(self, rows: Sequence[int]) -> list[Row]:
        return [self[row] for row in rows]


def _rise(offsets: npt.NDArray[np.int64]) -> bool:
    """Whether offsets never fall. Checked block by block, because the offsets of many documents may not fit into memory."""
    parts = (offsets[at : at + _AT_ONCE + 1] for at in range(0, len(offsets), _AT_ONCE))
    return not any((part[1:] < part[:-1]).any() for part in parts)


def _row_starts(offsets: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Where rows begin in the tokens, then the end. Each row takes the next documents as long as they fit whole."""
    sizes = np.diff(offsets)
    pieces = np.maximum(1, -(-sizes // length))  # only a document longer than a row is more than one
    within = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    edges = np.unique(np.append(np.repeat(offsets[:-1], pieces) + within * length, offsets[-1]))
    # For each edge, the furthest edge that a row from there reaches; then follow these from the first edge.
    reach = (np.searchsorted(edges, edges + length, side="right") - 1).tolist()
    at, starts = 0, [0]
    while at < len(edges) - 1:
        at = reach[at]
        starts.append(at)
    return edges[starts]


def cu_seqlens(documents: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Offsets of the documents in a batch whose rows are concatenated, for attention over sequences of different lengths.

    Padding, and the part of a document in another row, are separate sequences.

    Args:
        documents: (rows, length), as in `Row`.
    Returns:
        int32 of shape (sequences + 1,) that begins with 0 and ends with rows x length; and the length of the longest sequence.
    """
    changed = torch.ones_like(documents, dtype=torch.bool)
    changed[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = changed.flatten().nonzero().flatten()
    edges = torch.cat([starts, starts.new_tensor([documents.numel()])]).to(torch.int32)
    return edges, int(edges.diff().max())
