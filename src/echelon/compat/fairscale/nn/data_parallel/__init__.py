"""`fairscale.nn.data_parallel`: gradients, or everything, sharded over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.compat.fairscale.names import later
from echelon.compat.fairscale.nn.data_parallel.sharded_ddp import ShardedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from echelon.compat.fairscale.nn.data_parallel.fully_sharded_data_parallel import (
        FullyShardedDataParallel,
        TrainingState,
        get_fsdp_instances,
        no_pre_load_state_dict_hook,
    )

    auto_wrap_bn: Callable[..., nn.Module]

__all__ = [
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "TrainingState",
    "auto_wrap_bn",
    "get_fsdp_instances",
    "no_pre_load_state_dict_hook",
]

_FSDP = "nn.data_parallel.fully_sharded_data_parallel"

__getattr__ = later(
    "nn.data_parallel",
    {
        **dict.fromkeys(
            ("FullyShardedDataParallel", "TrainingState", "get_fsdp_instances", "no_pre_load_state_dict_hook"),
            _FSDP,
        ),
        "auto_wrap_bn": "nn.wrap.batch_norm",
    },
    {},
)
