"""Callbacks that come with the library."""

from echelon.loop.callbacks.saver import DistributedCheckpointSaver, RestoreOptions

__all__ = ["DistributedCheckpointSaver", "RestoreOptions"]
