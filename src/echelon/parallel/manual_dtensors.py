"""Modules whose layers the user split by hand, with `parallelize_module` or `distribute_module`, and did nothing else to.

The ranks that split a layer work on the same samples. Nothing averages gradients over other ranks.
"""

from __future__ import annotations

import math

from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.axes import Share, axes_of, declared, split_axes
from echelon.parallel.prepared import Prepared
from echelon.parallel.registry import Kind, register, wrapper_of
from echelon.parallel.shards import is_split
from echelon.world.init import World

__all__ = ["DTensorPrepared"]


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
