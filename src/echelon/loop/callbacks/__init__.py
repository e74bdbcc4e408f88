"""Callbacks that come with the library."""

from echelon.loop.callbacks.rollback import RollBack
from echelon.loop.callbacks.saver import BestCheckpointConfig, DistributedCheckpointSaver, RestoreOptions

__all__ = ["BestCheckpointConfig", "DistributedCheckpointSaver", "RestoreOptions", "RollBack"]
