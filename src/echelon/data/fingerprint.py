"""A dataset's fingerprint: a cheap check that a resumed run has the same data in the same order.

It holds the length and the checksums of a few samples at fixed places. Checksums exist only for numbers, text, bytes, tensors,
arrays and containers of these, and only if two readings of the sample agree; with augmentation they do not.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from echelon.data.workers import start_method
from echelon.world import rng
from echelon.world.tensor_bytes import flat_bytes

__all__ = ["checksum", "fingerprint", "read_twice"]

# Samples to read, each twice, once in a run.
_SAMPLES = 4


def fingerprint(dataset: Any, *, in_worker: bool) -> dict[str, Any]:
    """{"length", "samples": checksum by index, or None}. Leaves the RNG states as they are.

    Args:
        in_worker: read in a separate process, because workers will read the dataset. If a dataset opens its file at the first
            read, workers forked afterwards would share the open file and its position.
    """
    length = len(dataset)
    places = sorted({i * (length - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)})
    twice = _Twice(dataset)
    if in_worker:
        reading = DataLoader[Any](
            twice,  # type: ignore[arg-type]
            batch_size=None,
            sampler=places,
            num_workers=1,
            generator=torch.Generator(),
            timeout=60,
            multiprocessing_context=start_method(),
        )
        sums = list(reading)
    else:
        with rng.unchanged():
            sums = [twice[i] for i in places]
    return {"length": length, "samples": {str(i): value for i, value in zip(places, sums, strict=True)}}


class _Twice:
    """Maps an index to the sample's checksum if two readings agree."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> int | None:
        return read_twice(self._dataset, index)


def read_twice(dataset: Any, index: int) -> int | None:
    """The sample's checksum; None if two readings differ, or it cannot be read."""
    try:
        first, second = checksum(dataset[index]), checksum(dataset[index])
    except Exception:  # reading the sample in its turn raises again, with a better message
        return None
    return first if first == second else None


def checksum(sample: Any) -> int | None:
    """CRC-32 of a sample's values, types and shapes; None if it holds anything that cannot be read as bytes."""
    if isinstance(sample, torch.Tensor):
        if sample.layout != torch.strided or sample.is_quantized:
            return None
        return zlib.crc32(flat_bytes(sample.cpu()).numpy().tobytes(), _of_text(f"{sample.dtype}{tuple(sample.shape)}"))
    if isinstance(sample, (np.ndarray, np.generic)):
        if sample.dtype.hasobject:
            return None
        return zlib.crc32(np.asarray(sample).tobytes(), _of_text(f"{sample.dtype}{sample.shape}"))
    if isinstance(sample, (bytes, bytearray)):
        return zlib.crc32(sample)
    if sample is None or isinstance(sample, (str, int, float, complex)):
        return _of_text(repr(sample))
    if isinstance(sample, Mapping):
        return checksum([part for item in sample.items() for part in item])
    if isinstance(sample, Sequence):
        parts = [checksum(part) for part in sample]
        return None if None in parts else _of_text(repr(parts))
    return None


def _of_text(text: str) -> int:
    return zlib.crc32(text.encode())
