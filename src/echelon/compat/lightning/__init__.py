"""`lightning`: what `lightning.pytorch` has at its top."""

from typing import Any

from echelon.compat.lightning import pytorch
from echelon.compat.lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from echelon.compat.lightning.pytorch.successors import NAMES, missing

__all__ = ["Callback", "LightningDataModule", "LightningModule", "Trainer", "pytorch", "seed_everything"]


def __getattr__(name: str) -> Any:
    return missing(__name__, name, NAMES)
