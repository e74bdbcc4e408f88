"""Callbacks that come with the library."""

from echelon.loop.callbacks.csv_writer import BaseCSVWriter
from echelon.loop.callbacks.early_stopping import EarlyStopping
from echelon.loop.callbacks.empty_loader import EmptyDataloaderDetectorCallback
from echelon.loop.callbacks.functions import Lambda
from echelon.loop.callbacks.housekeeping import EmptyCudaCache, EnableTensorFloat32, GarbageCollector, TorchCompile
from echelon.loop.callbacks.learning_rate import LearningRateMonitor
from echelon.loop.callbacks.parameters import TensorBoardParameterMonitor
from echelon.loop.callbacks.profiling import MemorySnapshot, PyTorchProfiler
from echelon.loop.callbacks.progress_bar import TQDMProgressBar
from echelon.loop.callbacks.reporting import ProgressReporter, TrainProgressMonitor
from echelon.loop.callbacks.slow_rank import SlowRankDetector
from echelon.loop.callbacks.summary import ModuleSummary
from echelon.loop.callbacks.sync import PeriodicDistributedSync
from echelon.loop.callbacks.system_resources import SystemResourcesMonitor
from echelon.loop.callbacks.time_limit import TimeLimitInterrupter
from echelon.loop.callbacks.times import IterationTimeLogger, ThroughputLogger, TimeWaitForBatchLogger
from echelon.loop.checkpointing.rollback import RollBack
from echelon.loop.checkpointing.saver import BestCheckpointConfig, DistributedCheckpointSaver, RestoreOptions

__all__ = [
    "BaseCSVWriter",
    "BestCheckpointConfig",
    "DistributedCheckpointSaver",
    "EarlyStopping",
    "EmptyCudaCache",
    "EmptyDataloaderDetectorCallback",
    "EnableTensorFloat32",
    "GarbageCollector",
    "IterationTimeLogger",
    "Lambda",
    "LearningRateMonitor",
    "MemorySnapshot",
    "ModuleSummary",
    "PeriodicDistributedSync",
    "ProgressReporter",
    "PyTorchProfiler",
    "RestoreOptions",
    "RollBack",
    "SlowRankDetector",
    "SystemResourcesMonitor",
    "TQDMProgressBar",
    "TensorBoardParameterMonitor",
    "ThroughputLogger",
    "TimeLimitInterrupter",
    "TimeWaitForBatchLogger",
    "TorchCompile",
    "TrainProgressMonitor",
]
