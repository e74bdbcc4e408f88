"""torchtnt.utils.early_stop_checker."""

from echelon.loop.early_stop import EarlyStopChecker

__all__ = ["EarlyStopChecker"]
