"""torchtnt.framework.callbacks.iteration_time_logger."""

from echelon.compat.torchtnt.framework.callbacks.times import IterationTimeLogger

__all__ = ["IterationTimeLogger"]
