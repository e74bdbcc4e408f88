"""torchtnt.framework.callbacks.progress_reporter."""

from echelon.loop.callbacks.reporting import ProgressReporter

__all__ = ["ProgressReporter"]
