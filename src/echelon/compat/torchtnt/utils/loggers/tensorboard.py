"""torchtnt.utils.loggers.tensorboard."""

from echelon.observe.loggers.tensorboard import TensorBoardLogger

__all__ = ["TensorBoardLogger"]
