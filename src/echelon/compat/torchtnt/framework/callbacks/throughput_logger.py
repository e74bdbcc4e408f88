"""torchtnt.framework.callbacks.throughput_logger."""

from echelon.compat.torchtnt.framework.callbacks.times import ThroughputLogger

__all__ = ["ThroughputLogger"]
