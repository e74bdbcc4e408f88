"""A loader whose samples nobody divided between the ranks: each trains on all of them, which is seldom meant."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from echelon.contracts.errors import UsageError
from echelon.data.fingerprint import read_twice
from echelon.loop.unit import Unit
from echelon.world import agree, rng

__all__ = ["warn_of_same_samples"]

logger = logging.getLogger(__name__)


def warn_of_same_samples(loader: Any, unit: Unit) -> None:
    """Where ranks train one model on other data, as far as a look at the dataset tells. Collective."""
    told = agree.kinds(_seen(loader))
    if len(told) > 1 or told[0] is None or not agree.is_rank0():
        return
    size = 1
    with contextlib.suppress(UsageError):  # nothing says which ranks have other samples
        _, size = unit.data_rank_and_size or (0, 1)
    if size > 1:
        logger.warning(
            "each of %s ranks trains on all %s samples of the DataLoader in every epoch, instead of its share: nothing divides "
            "them. Give echelon.Loader(dataset, global_batch=%s), or a DataLoader with a DistributedSampler",
            size,
            told[0][0],
            size * (loader.batch_size or 1),
        )


def _seen(loader: Any) -> list[int] | None:
    """[length, checksum of a sample] of a dataset that torch reads to its end; None if nothing is known."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader.sampler) not in (SequentialSampler, RandomSampler) or loader.batch_size is None:
        return None
    # What workers will read is not opened here: they would share the open file.
    if loader.num_workers and not isinstance(loader.dataset, TensorDataset):
        return None
    length = len(loader.dataset)  # type: ignore[arg-type]
    if len(loader.sampler) != length or getattr(loader.sampler, "replacement", False):  # type: ignore[arg-type]  # ranks may draw others
        return None
    before = rng.states()
    sample = read_twice(loader.dataset, 0) if length else None
    rng.put_back(before)
    return None if sample is None else [length, sample]
