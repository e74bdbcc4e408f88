"""torchtnt.utils.loggers: loggers of numbers, by their names there."""

from echelon.compat.torchtnt.absent import absent
from echelon.compat.torchtnt.utils.loggers.csv import CSVLogger
from echelon.compat.torchtnt.utils.loggers.in_memory import InMemoryLogger
from echelon.compat.torchtnt.utils.loggers.logger import MetricLogger, Scalar
from echelon.compat.torchtnt.utils.loggers.stdout import StdoutLogger
from echelon.compat.torchtnt.utils.loggers.tensorboard import TensorBoardLogger
from echelon.compat.torchtnt.utils.loggers.utils import scalar_to_float

__all__ = [
    "CSVLogger",
    "InMemoryLogger",
    "MetricLogger",
    "Scalar",
    "StdoutLogger",
    "TensorBoardLogger",
    "scalar_to_float",
]

__getattr__ = absent("utils.loggers")
