"""torchtnt.utils.lr_scheduler."""

from torch.optim.lr_scheduler import LRScheduler as TLRScheduler

__all__ = ["TLRScheduler"]
