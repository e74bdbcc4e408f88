"""torchtnt.utils.anomaly_evaluation."""

from echelon.observe.loggers.anomaly import IsNaNEvaluator, MetricAnomalyEvaluator, ThresholdEvaluator

__all__ = ["IsNaNEvaluator", "MetricAnomalyEvaluator", "ThresholdEvaluator"]
