"""Loggers of named numbers: to files, to TensorBoard, to memory, to the terminal. Monitors among the callbacks write to them.

The numbers of every update are in the run's `metrics.jsonl` without any of these; a logger is for numbers of one's own.
"""

from echelon.observe.loggers.anomaly import (
    AnomalyLogger,
    IsNaNEvaluator,
    MetricAnomalyEvaluator,
    ThresholdEvaluator,
    TrackedMetric,
)
from echelon.observe.loggers.file import CSVLogger, FileLogger, JSONLogger
from echelon.observe.loggers.logger import MetricLogger, Scalar, scalar_to_float
from echelon.observe.loggers.memory import InMemoryLogger
from echelon.observe.loggers.stdout import StdoutLogger
from echelon.observe.loggers.tensorboard import TensorBoardLogger

__all__ = [
    "AnomalyLogger",
    "CSVLogger",
    "FileLogger",
    "InMemoryLogger",
    "IsNaNEvaluator",
    "JSONLogger",
    "MetricAnomalyEvaluator",
    "MetricLogger",
    "Scalar",
    "StdoutLogger",
    "TensorBoardLogger",
    "ThresholdEvaluator",
    "TrackedMetric",
    "scalar_to_float",
]
