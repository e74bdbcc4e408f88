"""A phase's batches: one or several loaders from the call, the data module or the module, up to their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch.datamodule import LightningDataModule
from echelon.compat.lightning.pytorch.hooks import ModuleHooks, overridden
from echelon.compat.trainer.rank import kept_global_batch, length_of, shared
from echelon.contracts.rank import RankInfo
from echelon.data.base import BaseLoader
from echelon.data.chain import Chain
from echelon.world import agree

__all__ = [
    "batches_of",
    "chain",
    "given_loaders",
    "limit_of",
    "one_loader",
    "prepare_data",
    "without_shuffling",
]


def prepare_data(module: Any, datamodule: Any) -> None:
    """Call `prepare_data` on the first rank of each node; the others wait. Collective."""
    failed = None
    if RankInfo.from_env().local_rank == 0:
        try:
            datamodule.prepare_data()
            module.prepare_data()
        except Exception as error:  # a download may raise anything; the other ranks would wait
            failed = error
    agree.fail_together(failed, "prepare_data")


def given_loaders(name: str, given: Any, module: Any, datamodule: Any) -> Any:
    """The given loaders, or those from the data module's or the module's hook; None if there are none."""
    if given is not None:
        return given
    hook = f"{name}_dataloader"
    if datamodule is not None and overridden(hook, datamodule, LightningDataModule):
        return getattr(datamodule, hook)()
    return getattr(module, hook)() if datamodule is None and overridden(hook, module, ModuleHooks) else None


def _is_several(loader: Any) -> bool:
    values = list(loader.values()) if isinstance(loader, Mapping) else loader
    loaders = (DataLoader, BaseLoader)
    return isinstance(values, (list, tuple)) and bool(values) and all(isinstance(each, loaders) for each in values)


def one_loader(phase: str, loaders: Any, data_size: int, accumulation: int, *, divides: bool, path: Path | None) -> Any:
    """
    Args:
        path: the checkpoint that training continues from.
        divides: whether to divide a DataLoader's samples between the ranks; False takes the DataLoader as it is.
    Raises:
        UsageError: there are several loaders.
    """
    if _is_several(loaders):
        if isinstance(loaders, (list, tuple)) and len(loaders) == 1:
            loaders = loaders[0]
        else:
            raise UsageError(
                f"{phase}: several dataloaders at once are not supported. Use one over a dataset that combines theirs, such as "
                "echelon.Mixture or torch.utils.data.StackDataset."
            )
    if not divides:
        return loaders
    kept = kept_global_batch(path, loaders, data_size, accumulation) if path is not None else None
    return shared(loaders, data_size, accumulation, trains=True, global_batch=kept)


def chain(phase: str, loaders: Any, data_size: int, limit: float | int | None, *, divides: bool) -> Chain:
    """The loaders of an evaluation, each of which the limit is for."""
    values = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    each_of = [shared(each, data_size, 1) if divides else each for each in (values if _is_several(loaders) else [loaders])]
    return Chain(each_of, [limit_of(f"limit_{phase}_batches", limit, each) for each in each_of])


def batches_of(loader: Any, limit: int | None) -> float:
    """Batches of an epoch; infinite without a limit and a length."""
    length = length_of(loader)
    return min(limit if limit is not None else math.inf, length if length is not None else math.inf)


def limit_of(name: str, limit: float | int | None, loader: Any) -> int | None:
    """A number of batches; None is all of them.

    Raises:
        UsageError: the limit is a part of a loader without a length, or less than one batch.
    """
    if limit is None or isinstance(limit, int):
        return limit
    if limit == 1.0:
        return None
    length = length_of(loader)
    if length is None:
        raise UsageError(f"{name}={limit}: the dataloader has no length. Give a number of batches.")
    if limit and not int(length * limit):
        raise UsageError(f"{name}={limit} of {length} batches is none. Give {1 / length:.3g} or more, or a number of batches.")
    return int(length * limit)


def without_shuffling(loader: Any) -> Any:
    """The loader with the same batches in every epoch, for `overfit_batches`."""
    if not isinstance(loader, DataLoader) or isinstance(loader.sampler, SequentialSampler) or loader.batch_size is None:
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        shuffle=False,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
    )
