"""Callbacks that come with the library."""

from echelon.loop.callbacks.early_stopping import EarlyStopping
from echelon.loop.callbacks.monitors import GarbageCollector, LearningRateMonitor, PyTorchProfiler
from echelon.loop.callbacks.rollback import RollBack
from echelon.loop.checkpointing.saver import BestCheckpointConfig, DistributedCheckpointSaver, RestoreOptions

__all__ = [
    "BestCheckpointConfig",
    "DistributedCheckpointSaver",
    "EarlyStopping",
    "GarbageCollector",
    "LearningRateMonitor",
    "PyTorchProfiler",
    "RestoreOptions",
    "RollBack",
]
