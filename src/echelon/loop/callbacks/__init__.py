"""Callbacks that come with the library."""

from echelon.loop.callbacks.early_stopping import EarlyStopping
from echelon.loop.callbacks.garbage import GarbageCollector
from echelon.loop.callbacks.learning_rate import LearningRateMonitor
from echelon.loop.callbacks.profiler import PyTorchProfiler
from echelon.loop.checkpointing.rollback import RollBack
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
