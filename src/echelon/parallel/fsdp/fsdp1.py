"""The older FullyShardedDataParallel: modules that users wrapped in it, and its vocabulary in `fully_shard`'s."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.axes import Axis
from echelon.parallel.fsdp.buffers import Buffers
from echelon.parallel.fsdp.fsdp1_state import FSDP1OptimizerState
from echelon.parallel.prepared import WrapperPrepared
from echelon.parallel.registry import Kind, imported, register
from echelon.world.init import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy

__all__ = ["FSDP1Prepared", "precision_policies", "sharding_named"]


class FSDP1Prepared(WrapperPrepared["FullyShardedDataParallel"]):
    """A module that the user wrapped in the older FullyShardedDataParallel; echelon itself does not build on it."""

    forward_is_collective = True
    replaces_parameters = True
    flattens_parameters = True

    def __init__(self, module: FullyShardedDataParallel, world: World) -> None:
        # With copies of the shards `process_group` has the ranks of one copy; what is over all copies has no public name.
        copies = module.sharding_strategy.name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        super().__init__(module, [Axis.of(None if copies else module.process_group)])

    def adopt(self) -> None:
        Buffers.keep_equal(self.module, self.data_groups, begin=True)

    def parameters_written(self) -> None:
        raise LayoutError(
            "the older FullyShardedDataParallel keeps copies of its parameters that cannot be told of a change, so its weights "
            "cannot be averaged. Pass the plain module with layout='fsdp'."
        )

    def gathered(self) -> AbstractContextManager[Any]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        context: AbstractContextManager[Any] = FullyShardedDataParallel.summon_full_params(self.module, writeback=False)
        return context

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return self.module.clip_grad_norm_(max_norm, norm_type)


def is_fsdp1(module: nn.Module) -> bool:
    return isinstance(module, imported("torch.distributed.fsdp", "FullyShardedDataParallel"))


register(Kind("fsdp1", is_fsdp1, FSDP1Prepared, inner="_fsdp_wrapped_module", optimizer_state=FSDP1OptimizerState))

# (reshard after the forward, replicas of the shards)
_SHARDINGS = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "_HYBRID_SHARD_ZERO2": (False, True),
}


def sharding_named(value: Any) -> tuple[bool, bool]:
    """A ShardingStrategy, or its name, as (reshard after the forward, replicas of the shards). None is FULL_SHARD.

    Raises:
        UsageError: NO_SHARD, which is "ddp"; anything unknown.
    """
    name = getattr(value, "name", value) or "FULL_SHARD"
    if name == "NO_SHARD":
        raise LayoutError("sharding_strategy must shard something, got NO_SHARD. Use layout 'ddp' instead.")
    if name not in _SHARDINGS:
        raise LayoutError(f"sharding_strategy must be one of {', '.join(_SHARDINGS)}, got {value!r}.")
    return _SHARDINGS[name]


def precision_policies(value: Any, module: nn.Module) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """The older FSDP's MixedPrecision, or `fully_shard`'s policy, as policies for (the root, the blocks).

    Raises:
        UsageError: an option without a counterpart.
    """
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    if value is None or isinstance(value, MixedPrecisionPolicy):
        policy = value or MixedPrecisionPolicy()
        return policy, policy
    if not isinstance(value, MixedPrecision):
        raise LayoutError(f"mixed_precision must be torch's MixedPrecision or MixedPrecisionPolicy, got {type(value).__name__}.")
    if value.keep_low_precision_grads:
        raise LayoutError(
            "MixedPrecision(keep_low_precision_grads=True): gradients have the parameters' type. For gradients in half "
            "precision, build the module in that type."
        )
    if value.buffer_dtype is not None:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(value.buffer_dtype)
    types = {"param_dtype": value.param_dtype, "reduce_dtype": value.reduce_dtype or value.param_dtype}
    root = MixedPrecisionPolicy(**types, cast_forward_inputs=value.cast_root_forward_inputs or value.cast_forward_inputs)
    return root, MixedPrecisionPolicy(**types, cast_forward_inputs=value.cast_forward_inputs)
