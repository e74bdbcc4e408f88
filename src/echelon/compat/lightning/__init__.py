"""`lightning`: what `lightning.pytorch` has at its top."""

from echelon.compat.lightning import pytorch
from echelon.compat.lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from echelon.compat.lightning.pytorch import __version__ as __version__
from echelon.compat.lightning.pytorch.absent import FABRIC, absent
from echelon.compat.names import complete, register

__all__ = ["Callback", "LightningDataModule", "LightningModule", "Trainer", "pytorch", "seed_everything"]


__getattr__ = absent(__name__)
register("lightning", __name__, {name: f"{instead}." for name, instead in FABRIC.items()})
complete(f"{__name__}.pytorch", absent)
