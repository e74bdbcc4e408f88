"""torchtnt.framework.callbacks.iteration_time_logger."""

from echelon.loop.callbacks.times import IterationTimeLogger

__all__ = ["IterationTimeLogger"]
