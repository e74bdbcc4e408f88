"""torchtnt.utils.loggers.anomaly_logger."""

from echelon.observe.loggers.anomaly import AnomalyLogger, TrackedMetric

__all__ = ["AnomalyLogger", "TrackedMetric"]
