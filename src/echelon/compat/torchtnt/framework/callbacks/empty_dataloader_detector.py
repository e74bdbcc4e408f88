"""torchtnt.framework.callbacks.empty_dataloader_detector."""

from echelon.loop.callbacks.empty_loader import EmptyDataloaderDetectorCallback

__all__ = ["EmptyDataloaderDetectorCallback"]
