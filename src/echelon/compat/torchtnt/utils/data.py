"""torchtnt.utils.data: reads ahead in loops of your own; echelon's loops read ahead themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch

from echelon.common.errors import LoaderError
from echelon.world.device import copy_data_to_device, record_stream

__all__ = ["CudaDataPrefetcher"]

Batch = TypeVar("Batch")


class CudaDataPrefetcher(Iterator[Batch], Generic[Batch]):
    """Batches on a GPU, some of them read and copied ahead on a stream of their own. Each `iter` starts over.

    Pinned host memory makes the copies run beside the computation.

    Args:
        data_iterable: gives batches.
        device: a GPU.
        num_prefetch_batches: how many are read ahead.
    Raises:
        UsageError: `num_prefetch_batches` is less than 1.
    """

    def __init__(self, data_iterable: Iterable[Batch], device: torch.device, num_prefetch_batches: int = 1) -> None:
        if num_prefetch_batches < 1:
            raise LoaderError(f"`num_prefetch_batches` must be greater than 0. Got {num_prefetch_batches}.")
        self.data_iterable, self.device, self.num_prefetch_batches = data_iterable, device, num_prefetch_batches
        self._stream = torch.cuda.Stream(device)
        self._source: Iterator[Batch] | None = None
        self._ahead: deque[tuple[Batch, torch.cuda.Event]] = deque()

    def __iter__(self) -> CudaDataPrefetcher[Batch]:
        self._source = None
        self._ahead.clear()
        return self

    def __next__(self) -> Batch:
        if self._source is None:  # not earlier: a loader's workers would start for nothing
            self._source = iter(self.data_iterable)
            for _ in range(self.num_prefetch_batches):
                self._fetch(self._source)
        if not self._ahead:
            raise StopIteration
        batch, copied = self._ahead.popleft()
        using = torch.cuda.current_stream(self.device)
        using.wait_event(copied)
        record_stream(batch, using)  # its memory belongs to the copying stream, which must not reuse it while this one reads
        self._fetch(self._source)
        return batch

    def _fetch(self, source: Iterator[Batch]) -> None:
        for batch in source:
            with torch.cuda.stream(self._stream):
                moved = copy_data_to_device(batch, self.device, non_blocking=True)
            self._ahead.append((moved, self._stream.record_event()))
            return
