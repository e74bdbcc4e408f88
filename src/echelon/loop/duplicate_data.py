"""A loader whose samples nobody divided between the ranks: each trains on all of them, which is seldom meant."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, TensorDataset

from echelon.common.errors import UsageError
from echelon.data.fingerprint import checksum, read_twice
from echelon.data.loader import Loader
from echelon.loop.unit import Unit
from echelon.world import agree, rng

__all__ = ["warn_of_same_samples"]

logger = logging.getLogger(__name__)


def warn_of_same_samples(loader: Any, unit: Unit) -> None:
    """Where ranks train one model on other data, as far as a look at the dataset tells. Collective."""
    told = agree.kinds(_seen(loader))
    if isinstance(loader, Loader):
        if len(told) > 1 and None not in told and agree.is_rank0():
            logger.warning(
                "ranks give the Loader datasets with other samples, of which each reads its share only: what was divided before, "
                "as by split_dataset_by_node, Subset or Dataset.shard, is divided twice, and the rest is never trained on. Give "
                "every rank the whole dataset"
            )
        return
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
    if isinstance(loader, Loader):
        return _part(loader.dataset) if loader.options.dp is None else None
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
    sample = _first(loader.dataset) if length else None
    return None if sample is None else [length, sample]


def _first(dataset: Any) -> int | None:
    before = rng.states()
    try:
        return read_twice(dataset, 0)
    finally:
        rng.put_back(before)


def _part(dataset: Any) -> list[int] | None:
    """[length, checksum] of a dataset whose samples are at hand; None of any other, which is not read before its turn."""
    if type(dataset) is Subset:
        found = checksum(list(dataset.indices))
    elif type(dataset) is TensorDataset or hasattr(dataset, "_fingerprint"):  # or a table of the library datasets
        found = _first(dataset) if len(dataset) else 0
    else:
        return None
    return None if found is None else [len(dataset), found]
