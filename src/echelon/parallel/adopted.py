"""Modules that users made parallel by hand, in ways in which no layout does: the older FSDP, split layers, DataParallel.

What `fully_shard` and DistributedDataParallel make is recognised beside the layouts that use them.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.axes import Axis, Share, axes_of, declared, split_axes
from echelon.parallel.fsdp.buffers import Buffers
from echelon.parallel.fsdp.fsdp1_state import FSDP1OptimizerState
from echelon.parallel.prepared import NO_CONTEXT, Form, Prepared, WrapperPrepared
from echelon.parallel.registry import Kind, imported, register, wrapper_of
from echelon.parallel.shards import is_split
from echelon.world.init import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

__all__ = ["DPPrepared"]


class FSDP1Prepared(WrapperPrepared["FullyShardedDataParallel"]):
    """A module that the user wrapped in the older FullyShardedDataParallel; echelon itself does not build on it."""

    forward_is_collective = True
    form = Form("flat")

    def __init__(self, module: FullyShardedDataParallel, world: World) -> None:
        # With copies of the shards `process_group` has the ranks of one copy; what is over all copies has no public name.
        copies = module.sharding_strategy.name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        super().__init__(module, [Axis.of(None if copies else module.process_group)])

    def _adopt(self) -> None:
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


# Layers that were split with `parallelize_module` or `distribute_module`. The ranks that split a layer work on the same samples;
# nothing averages gradients over other ranks.


class DTensorPrepared(Prepared[nn.Module]):
    """A module with DTensors for parameters, and no wrapper."""

    forward_is_collective = True

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(module)
        split = split_axes(module)
        copies = world.size // max(1, math.prod(axis.size for axis in split))
        if copies > 1 and declared(module) is None:
            names = " and ".join(repr(axis.name) for axis in split) or "no axis"
            self._share = Share(
                unknown=f"parameters of {type(module).__name__} are split over {names}, but {world.size} ranks run, and nothing "
                f"averages gradients over the {copies} that hold the same parts. Call fully_shard(module, mesh=mesh[...]) with "
                "the axis of other samples. In a TrainUnit that averages by itself: echelon.layouts.data_axes(module, mesh[...])."
            )

    def trains_also(self, others: list[nn.Parameter]) -> None:
        if self.dp_size > 1:
            axes = " and ".join(repr(axis.name) for axis in axes_of(declared(self.module)))  # type: ignore[arg-type]
            raise LayoutError(
                f"nothing averages gradients of {type(self.module).__name__} over {axes}. "
                "Call fully_shard(module, mesh=mesh[...]) with that axis."
            )
        super().trains_also(others)

    def fix_order(self) -> None:
        raise LayoutError("bit-equal training needs a mesh with one axis. Use fsdp, not tensor parallelism.")


def _is_split_by_hand(module: nn.Module) -> bool:
    return any(is_split(p) for p in module.parameters()) and not any(wrapper_of(m) for m in module.modules())


register(Kind("dtensors", _is_split_by_hand, DTensorPrepared, by_parameters=True))


class DPPrepared(WrapperPrepared["nn.DataParallel[Any]"]):
    """A module in DataParallel, ours or the user's own: one process, so one share of the data."""

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        return NO_CONTEXT  # gradients are gathered by autograd, where they add up

    def __init__(self, module: nn.DataParallel[Any], world: World) -> None:
        super().__init__(module)

    @property
    def data_rank_and_size(self) -> tuple[int, int] | None:
        return self.dp_rank, self.dp_size


register(Kind("dp", lambda module: isinstance(module, nn.DataParallel), DPPrepared, inner="module", unknown_to_torch=True))
