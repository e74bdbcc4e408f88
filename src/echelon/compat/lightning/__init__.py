"""`lightning`: what `lightning.pytorch` has at its top."""

from typing import Any

from echelon.compat.lightning import pytorch
from echelon.compat.lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from echelon.compat.lightning.pytorch import __version__ as __version__
from echelon.compat.lightning.pytorch.absent import FABRIC, NAMES, missing
from echelon.compat.names import leave_out

__all__ = ["Callback", "LightningDataModule", "LightningModule", "Trainer", "pytorch", "seed_everything"]


def __getattr__(name: str) -> Any:
    return missing(__name__, name, NAMES)


leave_out("lightning", __name__, {name: f"{instead}." for name, instead in FABRIC.items()})
