"""`fairscale.nn`: modules made parallel, recomputed, or wrapped one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.compat.fairscale.absent import alias, later
from echelon.compat.fairscale.nn.checkpoint import checkpoint_wrapper
from echelon.compat.fairscale.nn.data_parallel import ShardedDataParallel
from echelon.compat.fairscale.nn.wrap import auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap

if TYPE_CHECKING:
    from echelon.compat.fairscale.nn.data_parallel import FullyShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "auto_wrap",
    "checkpoint_wrapper",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]

alias(__name__.removesuffix(".nn"))

__getattr__ = later("nn", {"FullyShardedDataParallel": "nn.data_parallel.fully_sharded_data_parallel"})
