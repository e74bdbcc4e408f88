"""Where the numbers of a run go besides its own folder: files, TensorBoard, Weights & Biases, MLflow, Trackio."""

from echelon.observe.loggers import (
    CSVLogger,
    FileLogger,
    MetricLogger,
    MLflowLogger,
    OnlineLogger,
    RankLogger,
    Scalar,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
    get_logger,
    scalar_to_float,
)

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
