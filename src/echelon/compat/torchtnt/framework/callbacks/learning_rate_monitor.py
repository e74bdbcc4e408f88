"""torchtnt.framework.callbacks.learning_rate_monitor."""

from echelon.loop.callbacks.learning_rate import LearningRateMonitor

__all__ = ["LearningRateMonitor"]
