"""LightningDataModule: the loaders of a task, and what prepares their data."""

from __future__ import annotations

from typing import Any

import torch

from echelon.compat.lightning.pytorch.hparams import HyperparametersMixin
from echelon.world.device import copy_data_to_device

__all__ = ["LightningDataModule"]


class LightningDataModule(HyperparametersMixin):
    """Override what the task has. `prepare_data` runs once on each node, `setup` on every rank.

    `state_dict` and `load_state_dict` are part of checkpoints.
    """

    trainer: Any | None = None

    def __init__(self) -> None:
        super().__init__()

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None: ...

    def teardown(self, stage: str) -> None: ...

    def train_dataloader(self) -> Any:
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        raise NotImplementedError

    def on_exception(self, exception: BaseException) -> None: ...

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return copy_data_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "trainer"}
