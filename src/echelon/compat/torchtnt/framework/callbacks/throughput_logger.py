"""torchtnt.framework.callbacks.throughput_logger."""

from echelon.loop.callbacks.times import ThroughputLogger

__all__ = ["ThroughputLogger"]
