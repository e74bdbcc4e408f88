"""`lightning.pytorch.callbacks`: those that have a meaning here; the others say what to use."""

from typing import Any

from echelon.compat.lightning.pytorch.callbacks.base import Callback, LambdaCallback
from echelon.compat.lightning.pytorch.callbacks.early_stopping import EarlyStopping
from echelon.compat.lightning.pytorch.callbacks.learning_rate_monitor import LearningRateMonitor
from echelon.compat.lightning.pytorch.callbacks.model_checkpoint import Checkpoint, ModelCheckpoint
from echelon.compat.lightning.pytorch.successors import CALLBACKS, missing

__all__ = ["Callback", "Checkpoint", "EarlyStopping", "LambdaCallback", "LearningRateMonitor", "ModelCheckpoint"]


def __getattr__(name: str) -> Any:
    return missing(__name__, name, CALLBACKS)
