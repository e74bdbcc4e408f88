"""`fairscale.nn.data_parallel`: gradients, or everything, sharded over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.compat.fairscale.absent import later
from echelon.compat.fairscale.nn.data_parallel.sharded_ddp import ShardedDataParallel

if TYPE_CHECKING:
    from echelon.compat.fairscale.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel
    from echelon.compat.fairscale.nn.wrap import auto_wrap_bn

__all__ = ["FullyShardedDataParallel", "ShardedDataParallel", "auto_wrap_bn"]

__getattr__ = later(
    "nn.data_parallel",
    {"FullyShardedDataParallel": "nn.data_parallel.fully_sharded_data_parallel", "auto_wrap_bn": "nn.wrap"},
)
