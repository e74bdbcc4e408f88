"""Callbacks that come with the library, and their options."""

from echelon.loop.callbacks import EarlyStopping, GarbageCollector, LearningRateMonitor, PyTorchProfiler
from echelon.loop.checkpointing.options import RestoreOptions, SaveOptions
from echelon.loop.checkpointing.rollback import RollBack
from echelon.loop.checkpointing.saver import BestCheckpointConfig, DistributedCheckpointSaver
from echelon.loop.early_stop import EarlyStopChecker

__all__ = [
    "BestCheckpointConfig",
    "DistributedCheckpointSaver",
    "EarlyStopChecker",
    "EarlyStopping",
    "GarbageCollector",
    "LearningRateMonitor",
    "PyTorchProfiler",
    "RestoreOptions",
    "RollBack",
    "SaveOptions",
]
