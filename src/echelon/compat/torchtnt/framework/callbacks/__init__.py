"""torchtnt.framework.callbacks: all callbacks, by their names there."""

from echelon.compat.torchtnt.framework.callbacks.base_csv_writer import BaseCSVWriter
from echelon.compat.torchtnt.framework.callbacks.dcp_saver import DistributedCheckpointSaver
from echelon.compat.torchtnt.framework.callbacks.early_stopping import EarlyStopping
from echelon.compat.torchtnt.framework.callbacks.empty_cuda_cache import EmptyCudaCache
from echelon.compat.torchtnt.framework.callbacks.empty_dataloader_detector import EmptyDataloaderDetectorCallback
from echelon.compat.torchtnt.framework.callbacks.garbage_collector import GarbageCollector
from echelon.compat.torchtnt.framework.callbacks.iteration_time_logger import IterationTimeLogger
from echelon.compat.torchtnt.framework.callbacks.lambda_callback import Lambda
from echelon.compat.torchtnt.framework.callbacks.learning_rate_monitor import LearningRateMonitor
from echelon.compat.torchtnt.framework.callbacks.memory_snapshot import MemorySnapshot
from echelon.compat.torchtnt.framework.callbacks.module_summary import ModuleSummary
from echelon.compat.torchtnt.framework.callbacks.periodic_distributed_sync import PeriodicDistributedSync
from echelon.compat.torchtnt.framework.callbacks.progress_reporter import ProgressReporter
from echelon.compat.torchtnt.framework.callbacks.pytorch_profiler import PyTorchProfiler
from echelon.compat.torchtnt.framework.callbacks.slow_rank_detector import SlowRankDetector
from echelon.compat.torchtnt.framework.callbacks.system_resources_monitor import SystemResourcesMonitor
from echelon.compat.torchtnt.framework.callbacks.tensorboard_parameter_monitor import TensorBoardParameterMonitor
from echelon.compat.torchtnt.framework.callbacks.tensorfloat32 import EnableTensorFloat32
from echelon.compat.torchtnt.framework.callbacks.throughput_logger import ThroughputLogger
from echelon.compat.torchtnt.framework.callbacks.time_limit_interrupter import TimeLimitInterrupter
from echelon.compat.torchtnt.framework.callbacks.time_wait_for_batch_logger import TimeWaitForBatchLogger
from echelon.compat.torchtnt.framework.callbacks.torch_compile import TorchCompile
from echelon.compat.torchtnt.framework.callbacks.torchsnapshot_saver import TorchSnapshotSaver
from echelon.compat.torchtnt.framework.callbacks.tqdm_progress_bar import TQDMProgressBar
from echelon.compat.torchtnt.framework.callbacks.train_progress_monitor import TrainProgressMonitor

__all__ = [
    "BaseCSVWriter",
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
    "SlowRankDetector",
    "SystemResourcesMonitor",
    "TQDMProgressBar",
    "TensorBoardParameterMonitor",
    "ThroughputLogger",
    "TimeLimitInterrupter",
    "TimeWaitForBatchLogger",
    "TorchCompile",
    "TorchSnapshotSaver",
    "TrainProgressMonitor",
]
