"""The stages of ZeRO: what is sharded over the data-parallel ranks. Source: Rajbhandari et al. 2020.

stage 1: the optimizer's state (DistributedDataParallel, with a `Partition` of the optimizer);
stage 2: gradients as well (`fully_shard` that keeps whole parameters between forward and backward);
stage 3: parameters as well (`fully_shard`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.contracts.errors import UsageError
from echelon.parallel.ddp import DDPPrepared, DDPStrategy
from echelon.parallel.fsdp import FSDPStrategy
from echelon.parallel.partition import Partition
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe import Recipe
from echelon.parallel.strategy import Strategy
from echelon.world.init import World

__all__ = ["ZeROPrepared", "ZeROStrategy"]

O = TypeVar("O")  # noqa: E741


class ZeROPrepared(DDPPrepared):
    """A module in DistributedDataParallel, whose optimizer will be divided."""

    divides_optimizer = True

    def optimizer(self, make: Callable[[DistributedDataParallel], O]) -> O:
        made = super().optimizer(make)
        optimizer = made[0] if isinstance(made, tuple) and made else made
        if isinstance(optimizer, torch.optim.Optimizer):
            Partition(optimizer, self.module.process_group, {p: n for n, p in self.unwrapped.named_parameters()})
        return made


@dataclass(frozen=True, repr=False)
class ZeROStrategy(Strategy):
    """Divide optimizer state (stage 1), gradients (2) and parameters (3) over the ranks.

    In stage 1 the optimizer is divided when the unit builds it, so a unit of your own must build it by
    `prepared.optimizer(...)`; with `prepare_module` it is not.

    Args:
        stage: 1, 2 or 3.
        cpu_offload: as in FSDPStrategy; stages 2 and 3.
        options: all other options: a DDPStrategy for stage 1, an FSDPStrategy for stages 2 and 3.
    """

    stage: int = 1
    cpu_offload: bool = False
    options: DDPStrategy | FSDPStrategy | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage not in (1, 2, 3) or isinstance(self.stage, bool):
            raise UsageError(
                f"stage must be 1 (optimizer state), 2 (also gradients) or 3 (also parameters), got {self.stage!r}. "
                "Stage 0 is strategy 'ddp'."
            )
        kind = DDPStrategy if self.stage == 1 else FSDPStrategy
        if self.options is not None and not isinstance(self.options, kind):
            raise UsageError(f"options must be {kind.__name__}(...) for stage {self.stage}, got {type(self.options).__name__}.")
        if self.stage == 1 and self.cpu_offload:
            raise UsageError(
                "cpu_offload must be False for stage 1, whose parameters stay on the device, got True. Use stage 2 or 3."
            )
        object.__setattr__(self, "name", f"zero{int(self.stage)}")

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        if self.stage == 1:
            ddp = self.options if isinstance(self.options, DDPStrategy) else DDPStrategy()
            prepared = ddp.prepare(module, world, recipe)
            return ZeROPrepared(prepared.module, world) if isinstance(prepared, DDPPrepared) else prepared
        fsdp = self.options if isinstance(self.options, FSDPStrategy) else FSDPStrategy()
        reshard = self.stage == 3
        if fsdp.reshard_after_forward not in (None, reshard) or fsdp.sharding_strategy is not None:
            raise UsageError(f"reshard_after_forward must be left out of options, since stage {self.stage} decides it.")
        offload = self.cpu_offload or fsdp.cpu_offload
        return replace(fsdp, reshard_after_forward=reshard, cpu_offload=offload).prepare(module, world, recipe)
