"""Batch norms in FullyShardedDataParallel, each by itself."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.common.errors import UsageError
from echelon.compat.fairscale.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel
from echelon.compat.fairscale.nn.wrap.auto_wrap import auto_wrap, config_auto_wrap_policy, enable_wrap

__all__ = ["auto_wrap_bn"]


_CONFIG = {
    "mixed_precision": False,
    "flatten_parameters": False,
    "reshard_after_forward": False,
    "bucket_cap_mb": 0,
    "force_input_to_fp32": False,
}


class CollisionError(UsageError, AssertionError):
    """A batch norm is to be wrapped by another policy already."""


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: dist.ProcessGroup | None = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wrap every batch norm by itself, in full precision.

    Args:
        single_rank_pg: FairScale's for Apex; refused.
        fsdp_config: arguments for the wrappers; by default full precision, whole between forward and backward.
        wrap_it: False only sets `wrapper_config`, for `auto_wrap` with `config_auto_wrap_policy`.
        assert_on_collision: refuse a batch norm that has a `wrapper_config` already.
    """
    if single_rank_pg:
        raise UsageError("auto_wrap_bn(single_rank_pg=True): leave batch norms out of the wrapping, or use nn.SyncBatchNorm.")
    config = _CONFIG | {"process_group": process_group} if fsdp_config is None else fsdp_config
    for each in module.modules():
        if isinstance(each, _BatchNorm):
            if assert_on_collision and hasattr(each, "wrapper_config"):
                raise CollisionError(
                    "Module shouldn't already have a wrapper_config. Is it tagged already by another policy? Remove it, or "
                    "auto_wrap_bn(assert_on_collision=False)."
                )
            each.wrapper_config = config  # type: ignore[assignment]
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel) if wrap_it else nullcontext():
        return auto_wrap(module)
