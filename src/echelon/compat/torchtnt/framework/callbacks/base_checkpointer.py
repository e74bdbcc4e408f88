"""torchtnt.framework.callbacks.base_checkpointer: here the one saver there is."""

from echelon.loop.callbacks.saver import DistributedCheckpointSaver as BaseCheckpointer

__all__ = ["BaseCheckpointer"]
