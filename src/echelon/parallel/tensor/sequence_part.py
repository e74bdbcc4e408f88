"""A sequence of which each of the ranks that share layers has a part, and how it travels: see `sequence`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from echelon.common.errors import TensorParallelError
from echelon.parallel.axes import Axis
from echelon.parallel.tensor import collectives as traffic

__all__ = ["PartOfSequence"]

_DIM = 1  # (batch, sequence, features)


class PartOfSequence:
    """Which part of the present forward pass's sequence this rank has.

    Attributes:
        is_split: whether it has a part of it; a single token is whole on all ranks.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis, self._length = axis, 0
        self.is_split = False

    @property
    def _part(self) -> int:
        return -(-self._length // self._axis.size)

    def is_part(self, tensor: Any) -> bool:
        return self.is_split and isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and tensor.shape[_DIM] == self._part

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of a sequence (batch, length, features) that all have."""
        self._length = hidden.shape[_DIM]
        self.is_split = self._length > 1
        return traffic.part(self._filled(hidden), self._axis, _DIM) if self.is_split else hidden

    def end(self, hidden: torch.Tensor) -> torch.Tensor:
        """The whole sequence of the parts, for work that each rank does whole."""
        return self._cut(traffic.gathered(hidden, self._axis, _DIM)) if self.is_part(hidden) else hidden

    def collect(self, hidden: torch.Tensor) -> torch.Tensor:
        """The whole sequence of the parts, for split layers."""
        return self._cut(traffic.collected(hidden, self._axis, _DIM)) if self.is_part(hidden) else hidden

    def spread(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum of what the ranks have."""
        if hidden.dim() != 3 or hidden.shape[_DIM] != self._length:
            raise TensorParallelError(
                f"sequence_parallel: a 'rowwise' layer must get (batch, {self._length}, features), the whole sequence, and gives "
                f"{tuple(hidden.shape)}. Split the layers before it in the same submodule, or leave sequence_parallel out."
            )
        return traffic.spread(self._filled(hidden), self._axis, _DIM)

    def dropout(self, hidden: torch.Tensor, p: float) -> torch.Tensor:
        """The mask of the whole sequence, as one process draws it, of which this rank takes its part."""
        shape = (hidden.shape[0], self._length, *hidden.shape[2:])
        mask = F.dropout(torch.ones(shape, dtype=hidden.dtype, device=hidden.device), p)
        return hidden * traffic.part(self._filled(mask), self._axis, _DIM)

    def same(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter that works on this rank's part: its gradient is the sum over the ranks."""
        return traffic.whole(tensor, self._axis)

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        missing = self._part * self._axis.size - tensor.shape[_DIM]
        return F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing)) if missing else tensor

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.shape[_DIM] == self._length else tensor.narrow(_DIM, 0, self._length)
