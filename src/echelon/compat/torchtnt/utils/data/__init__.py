"""torchtnt.utils.data: prefetching, by its name there."""

from echelon.compat.torchtnt.absent import absent
from echelon.compat.torchtnt.utils.data.data_prefetcher import CudaDataPrefetcher

__all__ = ["CudaDataPrefetcher"]

__getattr__ = absent("utils.data")
