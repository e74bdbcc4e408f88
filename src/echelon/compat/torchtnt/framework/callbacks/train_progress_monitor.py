"""torchtnt.framework.callbacks.train_progress_monitor."""

from echelon.loop.callbacks.reporting import TrainProgressMonitor

__all__ = ["TrainProgressMonitor"]
