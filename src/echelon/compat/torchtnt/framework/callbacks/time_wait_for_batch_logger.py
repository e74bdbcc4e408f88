"""torchtnt.framework.callbacks.time_wait_for_batch_logger."""

from echelon.compat.torchtnt.framework.callbacks.times import TimeWaitForBatchLogger

__all__ = ["TimeWaitForBatchLogger"]
