"""`lightning.pytorch`, also for `pytorch_lightning`: LightningModule, Trainer and what belongs to them, on echelon's loop.

A LightningModule is trained as an AutoUnit (`automatic`), or, with manual optimization, as a TrainUnit (`manual`); a Trainer also
trains echelon's own units.
"""

from __future__ import annotations

import os
from typing import Any

from echelon.compat.lightning.pytorch import callbacks, loggers, strategies, utilities
from echelon.compat.lightning.pytorch.callbacks.base import Callback
from echelon.compat.lightning.pytorch.datamodule import LightningDataModule
from echelon.compat.lightning.pytorch.module import LightningModule
from echelon.compat.lightning.pytorch.successors import NAMES, missing
from echelon.compat.lightning.pytorch.trainer import Trainer
from echelon.world import rng

__all__ = [
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "callbacks",
    "loggers",
    "seed_everything",
    "strategies",
    "utilities",
]


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, numpy and torch. By default with PL_GLOBAL_SEED, or 0.

    `workers` and `verbose` have no effect: a data worker's streams follow from its rank's in any case.
    """
    value = seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))
    rng.seed(value)
    return value


def __getattr__(name: str) -> Any:
    return missing(__name__, name, NAMES)
