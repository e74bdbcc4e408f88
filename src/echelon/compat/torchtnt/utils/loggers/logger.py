"""torchtnt.utils.loggers.logger."""

from echelon.observe.loggers.logger import MetricLogger, Scalar

__all__ = ["MetricLogger", "Scalar"]
