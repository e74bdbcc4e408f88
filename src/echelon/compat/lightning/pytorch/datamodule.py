"""LightningDataModule: the loaders of a task, and what prepares their data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from torch.utils.data import DataLoader, Dataset, IterableDataset

from echelon.compat.lightning.pytorch.absent import ARGPARSE
from echelon.compat.lightning.pytorch.hooks import DataHooks
from echelon.compat.lightning.pytorch.hparams import HyperparametersMixin

__all__ = ["LightningDataModule"]


class LightningDataModule(DataHooks, HyperparametersMixin):
    """Override the hooks that the task needs. `prepare_data` runs once on each node, `setup` on every rank.

    `state_dict` and `load_state_dict` are part of checkpoints.
    """

    trainer: Any | None = None
    add_argparse_args = from_argparse_args = ARGPARSE

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Self:
        """A data module with DataLoaders over a dataset, or a list or dict of datasets, for each phase. Training shuffles.

        Args:
            batch_size: on each rank.
            datamodule_kwargs: arguments of the constructor.
        """

        def loaders(given: Any, shuffle: bool) -> Any:
            if isinstance(given, Mapping) and not isinstance(given, Dataset):
                return {name: loaders(each, shuffle) for name, each in given.items()}
            if isinstance(given, Sequence) and not isinstance(given, Dataset):
                return [loaders(each, shuffle) for each in given]
            shuffles = shuffle and not isinstance(given, IterableDataset)
            return DataLoader(given, batch_size=batch_size, shuffle=shuffles, num_workers=num_workers)

        made = cls(**datamodule_kwargs)
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for phase, dataset in given.items():
            if dataset is not None:
                vars(made)[f"{phase}_dataloader"] = partial(loaders, dataset, phase == "train")
        return made

    def on_exception(self, exception: BaseException) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "trainer"}
