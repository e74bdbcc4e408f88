"""`lightning.pytorch`, also for `pytorch_lightning`: LightningModule, Trainer and what belongs to them, on echelon's loop.

A LightningModule is trained as an AutoUnit (`automatic`), or, with manual optimization, as a TrainUnit (`manual`); a Trainer also
trains echelon's own units.
"""

from __future__ import annotations

import os
import sys

from echelon.compat.lightning.pytorch import callbacks, hparams, loggers, optimizers, strategies, utilities  # noqa: F401
from echelon.compat.lightning.pytorch.absent import ALIASES, ENVIRONMENTS, MODULES
from echelon.compat.lightning.pytorch.callbacks import Callback
from echelon.compat.lightning.pytorch.datamodule import LightningDataModule
from echelon.compat.lightning.pytorch.hparams import AttributeDict, HyperparametersMixin  # noqa: F401  # of `core.mixins`
from echelon.compat.lightning.pytorch.module import LightningModule
from echelon.compat.lightning.pytorch.optimizers import LightningOptimizer  # noqa: F401  # of `core.module`
from echelon.compat.lightning.pytorch.trainer import Trainer
from echelon.compat.names import register
from echelon.world import rng

__all__ = [
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "callbacks",
    "cli_lightning_logo",
    "loggers",
    "seed_everything",
    "strategies",
    "utilities",
]


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, numpy and torch. By default with PL_GLOBAL_SEED, or 0.

    `workers` and `verbose` have no effect: a data worker's RNG state always follows from its rank's.
    """
    value = seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))
    rng.seed(value)
    return value


LIGHTNING_LOGO = ""
__version__ = "2.6.6"  # the version of Lightning with these names; programs check it


def cli_lightning_logo() -> None:
    """Print nothing. In Lightning, it prints the logo."""


register("lightning.pytorch", __name__, {name: f"{instead}." for name, instead in MODULES.items()}, ALIASES)
for _name in ("plugins", "plugins.environments", "plugins.training_type"):
    vars(sys.modules[f"{__name__}.{_name}"]).update({_each: getattr(strategies, _each) for _each in ("DDPPlugin", *ENVIRONMENTS)})
