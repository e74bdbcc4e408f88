"""`fairscale.nn`, its `data_parallel` and its `checkpoint`: modules made parallel, recomputed, or wrapped one by one."""

from echelon.compat.fairscale.fsdp import FullyShardedDataParallel
from echelon.compat.fairscale.sharded_ddp import ShardedDataParallel
from echelon.compat.fairscale.wrap import (
    auto_wrap,
    auto_wrap_bn,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)
from echelon.nn import checkpoint_wrapper

__all__ = [
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "auto_wrap",
    "auto_wrap_bn",
    "checkpoint_wrapper",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]
