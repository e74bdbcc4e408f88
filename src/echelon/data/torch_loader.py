"""A torch DataLoader as an echelon.Loader: the same samples, divided between the ranks, in an order that can be resumed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from echelon.common.errors import LoaderError
from echelon.data.loader import Loader
from echelon.world import agree

__all__ = ["as_loader", "is_distributed"]


def is_distributed(loader: Any) -> bool:
    """Whether a DataLoader is divided between the ranks already."""
    return isinstance(loader, DataLoader) and isinstance(getattr(loader, "sampler", None), DistributedSampler)


def as_loader(loader: DataLoader[Any], global_batch: int, accumulation: int, why: str, *, number: int = 0) -> Loader:
    """Make an echelon.Loader from a DataLoader. Collective.

    The seed of its order is that of the DistributedSampler or the generator. Without one it follows from `torch.manual_seed`, as
    in torch, and a restored run keeps the seed that it began with.

    Args:
        global_batch: samples per update, over all ranks and micro-batches.
        why: for the error: why a loader with an order of its own cannot be used.
        number: number of this loader in a program with several; gives each another order.
    Raises:
        UsageError: the DataLoader has an order of its own: a sampler that is not torch's, or an iterable dataset; or its sampler
            draws only a part of the data.
    """
    sampler: Any = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    plain = _is(sampler, SequentialSampler) or (_is(sampler, RandomSampler) and not sampler.replacement)
    if not (plain or is_distributed(loader)) or loader.batch_size is None:
        own = loader.dataset if sampler is None else loader.batch_sampler if loader.batch_size is None else sampler
        what = "batch_size=None" if own is None else type(own).__name__
        first = "Give it Subset(dataset, indices), of torch.utils.data, and shuffle=True. Or use" if _chooses(sampler) else "Use"
        if _is(sampler, RandomSampler) and sampler.replacement:
            what, first = f"{what}(replacement=True)", "shuffle=True draws without replacement, in every epoch. Or use"
        if loader.batch_size is None and own is not None and sampler is not None:
            first = (
                "If all batches have the same size, echelon.Loader(Subset(dataset, [i for batch in batches for i in batch]), "
                "global_batch, shuffle=False) gives the ranks their shares. Or use"
            )
        raise LoaderError(
            f"a DataLoader with {what} {why}. {first} echelon.Loader (echelon.data.Weighted gives its samples weights), for "
            "iterable datasets echelon.StreamLoader, or a DistributedSampler of your own."
        )
    divided = is_distributed(loader)
    if not divided and len(sampler) != (size := len(loader.dataset)):  # type: ignore[arg-type]
        raise LoaderError(
            f"a DataLoader's {type(sampler).__name__} must draw every sample, got {len(sampler)} of {size}. Choose samples by "
            "torch.utils.data.Subset, or use echelon.data.Weighted."
        )
    batch = global_batch // accumulation
    if (size := len(loader.dataset)) < batch and loader.drop_last:  # type: ignore[arg-type]
        raise LoaderError(
            f"the DataLoader's batch_size of {loader.batch_size} makes batches of {batch} samples over the ranks, but its "
            f"dataset holds only {size}, which drop_last=True drops. Set batch_size to {loader.batch_size * size // batch} or "
            "less, or leave out drop_last."
        )
    generator = getattr(sampler, "generator", None)
    seed: int | None = sampler.seed if divided else generator.initial_seed() if isinstance(generator, torch.Generator) else None
    made = Loader(
        loader.dataset,
        global_batch,
        seed=(agree.from_rank0(torch.initial_seed) if seed is None else seed) + (0 if divided else number),
        shuffle=sampler.shuffle if divided else _is(sampler, RandomSampler),
        accumulate=accumulation,
        tail="drop" if loader.drop_last and accumulation == 1 else "keep",
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory or None,
    )
    if loader.drop_last and accumulation > 1:  # drop_last drops an incomplete batch, but not an incomplete update
        made.multiple = batch
    made.keeps_seed = seed is not None
    made.worker_init_fn = loader.worker_init_fn
    return made


def _chooses(sampler: Any) -> bool:
    """Whether a sampler only chooses a subset of the samples."""
    return type(sampler) is SubsetRandomSampler


def _is(sampler: Any, kind: type) -> bool:
    """Whether a sampler is torch's `kind`, or StatefulDataLoader's replacement for it."""
    sampler_class = type(sampler)
    return sampler_class is kind or (
        sampler_class.__module__ == "torchdata.stateful_dataloader.sampler" and sampler_class.__name__ == kind.__name__
    )
