"""torchtnt.utils.early_stop_checker."""

from echelon.loop.callbacks.early_stopping import EarlyStopChecker

__all__ = ["EarlyStopChecker"]
