"""Where the numbers of a run go besides its own folder: files, TensorBoard, Weights & Biases, MLflow, Trackio."""

from echelon.observe.loggers import *  # noqa: F403
from echelon.observe.loggers import __all__ as __all__
