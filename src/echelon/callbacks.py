"""Callbacks that come with the library, and their options."""

from echelon.loop.callbacks.early_stopping import EarlyStopChecker, EarlyStopping
from echelon.loop.callbacks.monitors import GarbageCollector, LearningRateMonitor, PyTorchProfiler
from echelon.loop.callbacks.rollback import RollBack
from echelon.loop.checkpointing.options import RestoreOptions, SaveOptions
from echelon.loop.checkpointing.saver import BestCheckpointConfig, DistributedCheckpointSaver

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
