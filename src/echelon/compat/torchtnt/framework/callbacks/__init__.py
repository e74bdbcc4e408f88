"""torchtnt.framework.callbacks: the callbacks that programs use, by their names there."""

from echelon.compat.torchtnt.absent import absent
from echelon.compat.torchtnt.framework.callbacks.dcp_saver import DistributedCheckpointSaver
from echelon.compat.torchtnt.framework.callbacks.early_stopping import EarlyStopping
from echelon.compat.torchtnt.framework.callbacks.garbage_collector import GarbageCollector
from echelon.compat.torchtnt.framework.callbacks.lambda_callback import Lambda
from echelon.compat.torchtnt.framework.callbacks.learning_rate_monitor import LearningRateMonitor
from echelon.compat.torchtnt.framework.callbacks.module_summary import ModuleSummary
from echelon.compat.torchtnt.framework.callbacks.pytorch_profiler import PyTorchProfiler
from echelon.compat.torchtnt.framework.callbacks.torchsnapshot_saver import TorchSnapshotSaver
from echelon.compat.torchtnt.framework.callbacks.tqdm_progress_bar import TQDMProgressBar

__all__ = [
    "DistributedCheckpointSaver",
    "EarlyStopping",
    "GarbageCollector",
    "Lambda",
    "LearningRateMonitor",
    "ModuleSummary",
    "PyTorchProfiler",
    "TQDMProgressBar",
    "TorchSnapshotSaver",
]

__getattr__ = absent("framework.callbacks")
