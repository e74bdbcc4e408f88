"""Loggers of named numbers, to files and to trackers. Monitor callbacks write to them.

The numbers of every update are in the run's `metrics.jsonl` without a logger; a logger is for further numbers.
"""

from echelon.observe.loggers.file import CSVLogger, FileLogger
from echelon.observe.loggers.logger import MetricLogger, RankLogger, Scalar, get_logger, scalar_to_float
from echelon.observe.loggers.online import MLflowLogger, OnlineLogger, TrackioLogger, WandbLogger
from echelon.observe.loggers.tensorboard import TensorBoardLogger

__all__ = [
    "CSVLogger",
    "FileLogger",
    "MLflowLogger",
    "MetricLogger",
    "OnlineLogger",
    "RankLogger",
    "Scalar",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "get_logger",
    "scalar_to_float",
]
