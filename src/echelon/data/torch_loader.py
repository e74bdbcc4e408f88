"""A torch DataLoader as an echelon.Loader: the same samples, divided between the ranks, in an order that can be resumed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from echelon.common.errors import LoaderError
from echelon.data.loader import Loader
from echelon.data.sampled import BatchedLoader, SampledLoader
from echelon.data.stream import StreamLoader, is_divided
from echelon.world import agree
from echelon.world.init import World

__all__ = ["as_loader", "is_distributed"]


def is_distributed(loader: Any) -> bool:
    """Whether a DataLoader is divided between the ranks already."""
    return isinstance(loader, DataLoader) and isinstance(getattr(loader, "sampler", None), DistributedSampler)


def as_loader(
    loader: DataLoader[Any], global_batch: int, accumulation: int, why: str, *, number: int = 0, together: int = 1
) -> Loader | StreamLoader:
    """Make an echelon.Loader from a DataLoader, or a StreamLoader if its dataset is iterable. Collective.

    torch's shuffle becomes echelon's, which costs no memory; any other sampler is drawn by itself. The seed is that of the
    DistributedSampler or the generator. Without one it follows from `torch.manual_seed`, as in torch, and a restored run keeps
    the seed that it began with.

    Args:
        global_batch: samples per update, over all ranks and micro-batches.
        why: for the error: why a loader with an order of its own cannot be used.
        number: number of this loader in a program with several; gives each another order.
        together: batches of a batch sampler that the ranks take at once.
    Raises:
        UsageError: the DataLoader has an order that cannot be divided: it makes no batches, or its sampler is endless, or draws
            for one rank.
    """
    if isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
        return _as_stream(loader, global_batch, accumulation, why)
    sampler: Any = loader.sampler if loader.batch_size is not None else loader.batch_sampler
    if sampler is None:
        raise LoaderError(
            f"a DataLoader with batch_size=None {why}. Give it the batch size of its samples, or use echelon.Loader, for "
            "iterable datasets echelon.StreamLoader."
        )
    divided, shuffles = is_distributed(loader), _is(sampler, RandomSampler) and not sampler.replacement
    if divided and not _is(sampler, DistributedSampler):
        raise LoaderError(
            f"a sampler with an order of its own must draw the samples of all ranks, which are then divided, got a "
            f"{type(sampler).__name__}, which is a DistributedSampler and draws those of one. Make it a torch.utils.data.Sampler."
        )
    if not hasattr(sampler, "__len__"):
        raise LoaderError(
            f"a sampler must have a length, the number of samples of an epoch, got a {type(sampler).__name__} without one. Give "
            "it __len__, and draw as many."
        )
    generator = getattr(sampler, "generator", None)
    seed: int | None = sampler.seed if divided else generator.initial_seed() if isinstance(generator, torch.Generator) else None
    how: dict[str, Any] = {
        "seed": (agree.from_rank0(torch.initial_seed) if seed is None else seed) + (0 if divided else number),
        "accumulate": accumulation,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory or None,
    }
    made: Loader
    if loader.batch_size is None:
        made = BatchedLoader(loader.dataset, sampler, together, **how)
    else:
        batch, drops, size = global_batch // accumulation, bool(loader.drop_last), len(loader.dataset)  # type: ignore[arg-type]
        drawn = size if divided else len(sampler)
        if drawn < batch and drops:
            raise LoaderError(
                f"the DataLoader's batch_size of {loader.batch_size} makes batches of {batch} samples over the ranks, but an "
                f"epoch has only {drawn}, which drop_last=True drops. Set batch_size to {loader.batch_size * drawn // batch} or "
                "less, or leave out drop_last."
            )
        how["tail"] = "drop" if drops and accumulation == 1 else "keep"
        if divided or ((shuffles or _is(sampler, SequentialSampler)) and drawn == size):
            made = Loader(loader.dataset, global_batch, shuffle=sampler.shuffle if divided else shuffles, **how)
        else:
            made = SampledLoader(loader.dataset, sampler, global_batch, **how)
        if drops and accumulation > 1:  # drop_last drops an incomplete batch, but not an incomplete update
            made.multiple = batch
    made.keeps_seed = seed is not None
    made.worker_init_fn = loader.worker_init_fn
    return made


def _as_stream(loader: DataLoader[Any], global_batch: int, accumulation: int, why: str) -> StreamLoader:
    """
    Raises:
        UsageError: there are several ranks, and it is unknown whether the dataset divides its samples itself.
    """
    dataset: Any = loader.dataset
    knows = hasattr(dataset, "set_place") or is_divided(dataset)
    if not knows and World.current(torch.device("cpu")).size > 1:
        raise LoaderError(
            f"a DataLoader with the iterable dataset {type(dataset).__name__} {why}. Give echelon.StreamLoader(dataset, "
            f"global_batch={global_batch}, shards='stride'), of which each rank keeps its share of the samples; or "
            "shards='itself', if the dataset divides them by rank."
        )
    return StreamLoader(
        dataset,
        global_batch,
        accumulate=accumulation,
        tail="drop" if loader.drop_last else "keep",
        shards=None if knows else "stride",
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory or None,
    )


def _is(sampler: Any, kind: type) -> bool:
    """Whether a sampler is torch's `kind`, or StatefulDataLoader's replacement for it."""
    sampler_class = type(sampler)
    return sampler_class is kind or (
        sampler_class.__module__.startswith("torchdata.stateful_dataloader") and kind.__name__ in sampler_class.__name__
    )
