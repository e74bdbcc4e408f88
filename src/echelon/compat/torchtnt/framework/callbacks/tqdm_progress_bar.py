"""torchtnt.framework.callbacks.tqdm_progress_bar."""

from echelon.loop.callbacks.progress_bar import TQDMProgressBar

__all__ = ["TQDMProgressBar"]
