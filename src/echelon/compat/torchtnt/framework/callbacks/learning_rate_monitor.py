"""torchtnt.framework.callbacks.learning_rate_monitor."""

from echelon.loop.callbacks.monitors import LearningRateMonitor

__all__ = ["LearningRateMonitor"]
