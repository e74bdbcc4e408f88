"""Read a part of a tensor from a file into given memory: few bytes besides its own, by plain read calls.

Reading, not mapping: if the file is cut off meanwhile, a read raises, while a mapping would kill the process; and reads can be
counted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from echelon.checkpoint.strict import Wrong
from echelon.world.tensor_bytes import flat_bytes

__all__ = ["Stored"]

# Limit of one read for a target that cannot take the file's bytes directly: it has another dtype or gaps, or is on a device.
_AT_ONCE_BYTES = 8 << 20
# Runs shorter than this are read together with the bytes between them: a read call takes as long as a few kilobytes.
_RUN_BYTES = 512


@dataclass(frozen=True)
class Stored:
    """A row-major tensor in a file.

    Args:
        file: an open file's descriptor.
        start: where the tensor begins in it.
    """

    file: int
    start: int
    dtype: torch.dtype
    shape: Sequence[int]

    def read_part(self, begins: Sequence[int], lengths: Sequence[int], into: torch.Tensor) -> None:
        """Fill `into`, of the shape `lengths` and any type and device, with a part of the tensor.

        Args:
            begins: where the part begins, by dimension.
        Raises:
            Wrong: the file is cut off.
            OSError: it cannot be read.
        """
        if not into.numel():
            return
        run, dim = self._run(lengths)
        if run * self.dtype.itemsize < _RUN_BYTES and dim >= 0 and math.prod(lengths[:dim]) > 1:
            wide = list(lengths)
            wide[dim] = self.shape[dim]
            if math.prod(wide) * self.dtype.itemsize <= _AT_ONCE_BYTES:
                scratch = torch.empty(wide, dtype=self.dtype)
                self.read_part([*begins[:dim], 0, *begins[dim + 1 :]], wide, scratch)
                into.copy_(scratch.narrow(dim, begins[dim], lengths[dim]))
                return
        elif into.dtype == self.dtype and into.device.type == "cpu" and into.is_contiguous():
            self._read_runs(begins, lengths, into)
            return
        elif math.prod(lengths) * self.dtype.itemsize <= _AT_ONCE_BYTES or max(lengths, default=1) == 1:
            scratch = torch.empty(list(lengths), dtype=self.dtype)
            self._read_runs(begins, lengths, scratch)
            into.copy_(scratch)
            return
        for at, narrowed in _halves(lengths):
            dim = at[0]
            part = into.narrow(dim, at[1], narrowed[dim])
            self.read_part([*begins[:dim], begins[dim] + at[1], *begins[dim + 1 :]], narrowed, part)

    def _run(self, lengths: Sequence[int]) -> tuple[int, int]:
        """(elements in each contiguous run of a part, the innermost dimension that the part does not cover, or -1)."""
        run, dim = 1, len(self.shape) - 1
        while dim >= 0 and lengths[dim] == self.shape[dim]:
            run *= self.shape[dim]
            dim -= 1
        return (run * lengths[dim], dim) if dim >= 0 else (run, -1)

    def _read_runs(self, begins: Sequence[int], lengths: Sequence[int], into: torch.Tensor) -> None:
        run, dim = self._run(lengths)
        memory = memoryview(flat_bytes(into).numpy())  # type: ignore[arg-type]
        size = run * self.dtype.itemsize
        for number, offset in enumerate(self._offsets(begins, lengths, dim)):
            _read(self.file, self.start + offset * self.dtype.itemsize, memory[number * size : (number + 1) * size])

    def _offsets(self, begins: Sequence[int], lengths: Sequence[int], dim: int) -> Iterator[int]:
        """Where the runs begin, in elements."""
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        first = sum(begin * stride for begin, stride in zip(begins, strides, strict=True))
        outer = [0] * max(dim, 0)
        while True:
            yield first + sum(index * stride for index, stride in zip(outer, strides, strict=False))
            for d in reversed(range(len(outer))):
                outer[d] += 1
                if outer[d] < lengths[d]:
                    break
                outer[d] = 0
            else:
                return


def _halves(lengths: Sequence[int]) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Both halves of a part, cut along its first dimension that can be divided: ((that dimension, begin in it), lengths)."""
    dim = next(d for d, n in enumerate(lengths) if n > 1)
    first = lengths[dim] // 2
    for begin, length in ((0, first), (first, lengths[dim] - first)):
        yield (dim, begin), [*lengths[:dim], length, *lengths[dim + 1 :]]


def _read(file: int, offset: int, memory: memoryview) -> None:
    while len(memory):
        got = os.preadv(file, [memory[: 1 << 30]], offset)
        if not got:
            raise Wrong(f"it ends at byte {offset}")
        memory, offset = memory[got:], offset + got
