"""`fairscale.nn.data_parallel`: gradients, or everything, sharded over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.compat.fairscale.absent import later
from echelon.compat.fairscale.nn.data_parallel.sharded_ddp import ShardedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from echelon.compat.fairscale.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel

    auto_wrap_bn: Callable[..., nn.Module]

__all__ = ["FullyShardedDataParallel", "ShardedDataParallel", "auto_wrap_bn"]

__getattr__ = later(
    "nn.data_parallel",
    {"FullyShardedDataParallel": "nn.data_parallel.fully_sharded_data_parallel", "auto_wrap_bn": "nn.wrap"},
)
