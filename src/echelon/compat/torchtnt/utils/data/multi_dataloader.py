"""torchtnt.utils.data.multi_dataloader."""

from echelon.data.multi_loader import MultiDataLoader

__all__ = ["MultiDataLoader"]
