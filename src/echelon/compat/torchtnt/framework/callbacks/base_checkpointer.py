"""torchtnt.framework.callbacks.base_checkpointer: here the one saver there is."""

from echelon.compat.torchtnt.framework.callbacks.dcp_saver import DistributedCheckpointSaver as BaseCheckpointer

__all__ = ["BaseCheckpointer"]
