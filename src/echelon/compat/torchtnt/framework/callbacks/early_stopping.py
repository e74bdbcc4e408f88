"""torchtnt.framework.callbacks.early_stopping."""

from echelon.loop.callbacks.early_stopping import EarlyStopping

__all__ = ["EarlyStopping"]
