"""LightningDataModule: the loaders of a task, and what prepares their data."""

from __future__ import annotations

from typing import Any

from echelon.compat.lightning.pytorch.hooks import DataHooks
from echelon.compat.lightning.pytorch.hparams import HyperparametersMixin

__all__ = ["LightningDataModule"]


class LightningDataModule(DataHooks, HyperparametersMixin):
    """Override what the task has. `prepare_data` runs once on each node, `setup` on every rank.

    `state_dict` and `load_state_dict` are part of checkpoints.
    """

    trainer: Any | None = None

    def __init__(self) -> None:
        super().__init__()

    def on_exception(self, exception: BaseException) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "trainer"}
