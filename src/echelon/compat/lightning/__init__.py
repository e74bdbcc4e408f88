"""`lightning`, also for `pytorch_lightning`: its Trainer, over echelon's units."""

from typing import Any

from echelon.compat.lightning.pytorch import Trainer, instead, seed_everything

__all__ = ["Trainer", "seed_everything"]


def __getattr__(name: str) -> Any:
    instead(__name__, name)
