"""torchtnt.framework.callbacks.tensorboard_parameter_monitor."""

from echelon.loop.callbacks.parameters import TensorBoardParameterMonitor

__all__ = ["TensorBoardParameterMonitor"]
