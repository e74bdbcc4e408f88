"""torchtnt.framework.callbacks.empty_cuda_cache."""

from echelon.loop.callbacks.housekeeping import EmptyCudaCache

__all__ = ["EmptyCudaCache"]
