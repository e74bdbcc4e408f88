"""torchtnt.utils.optimizer."""

from echelon.compat.torchtnt.absent import absent
from echelon.loop.callbacks.monitors import learning_rates as extract_lr_from_optimizer

__all__ = ["extract_lr_from_optimizer"]

__getattr__ = absent("utils.optimizer")
