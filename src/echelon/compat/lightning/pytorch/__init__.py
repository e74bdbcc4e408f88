"""`lightning.pytorch`: Trainer and `seed_everything`.

A Trainer trains an echelon unit. There is no LightningModule: what it logs, its hooks, its callbacks and its checkpoints are
Lightning's own, and an adapter that left half of them out would train something else without a word.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from echelon.compat.lightning.pytorch.trainer import Trainer
from echelon.contracts.errors import UsageError
from echelon.world import rng

__all__ = ["Trainer", "instead", "seed_everything"]

_INSTEAD = {
    "LightningModule": "an echelon.AutoUnit, whose compute_loss is training_step, and whose "
    "configure_optimizers_and_lr_scheduler is configure_optimizers",
    "LightningDataModule": "trainer.fit(unit, train_dataloaders, val_dataloaders)",
    "Callback": "echelon.Callback, whose hooks get (state, unit)",
    "Fabric": "echelon.init_from_env() and echelon.prepare_module, or a TrainUnit",
}


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, numpy and torch. By default with PL_GLOBAL_SEED, or 0.

    `workers` and `verbose` have no effect: a data worker's streams follow from its rank's in any case.
    """
    value = seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))
    rng.seed(value)
    return value


def instead(module: str, name: str) -> NoReturn:
    """A module's `__getattr__`: what takes the place of a name that Lightning has."""
    if name in _INSTEAD:
        raise UsageError(f"lightning.{name} is not part of echelon.compat. Instead: {_INSTEAD[name]}.")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def __getattr__(name: str) -> Any:
    instead(__name__, name)
