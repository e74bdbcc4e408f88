"""A module made parallel, moved to the device, and what follows from that for a loop that trains, evaluates or predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.common.errors import LoopError
from echelon.contracts.overrides import overrides
from echelon.loop.auto.unit_options import AutoOptions
from echelon.loop.unit import Unit
from echelon.parallel.names import without_compile
from echelon.parallel.networks import prepare_networks
from echelon.parallel.parallelize import check_module, parallelize
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.recipe.recipe import Recipe
from echelon.world.device import copy_data_to_device
from echelon.world.init import init_from_env

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["PreparedUnit"]


class PreparedUnit(Unit):
    """A module made parallel and moved to the device, in the precision that was asked for."""

    reports_own_steps = True
    weighs_padding = True
    has_several = False  # optimizers

    def _prepare(self, module: nn.Module, options: AutoOptions) -> None:
        """Make the module parallel, and set what follows from that. Collective."""
        check_module(module)
        decided = overrides()
        self.device = options.device or init_from_env()
        self.computes = Precision.of(decided.precision or options.precision)
        self.computes.look_at(self.device)
        self.detect_anomaly, self.enable_prefetch = options.detect_anomaly, options.prefetch
        compiled: Any = options.compile if decided.compile is not False else None
        recomputed: Any = options.recompute  # values by now, not names
        recipe = Recipe(recomputed, compiled, self.computes)
        make: Callable[..., Prepared[Any]] = prepare_networks if self.has_several else parallelize
        self.prepared = make(module, options.layout, self.device, recipe, overridden=decided.layout)
        made = self.prepared.module
        self.module: nn.Module = module if without_compile(module) is made else made  # torch.compile(DDP(...)) is called as such
        self._copies = torch.cuda.Stream(self.device) if self.enable_prefetch and self.device.type == "cuda" else None

    @property
    def forward_is_collective(self) -> bool:
        return self.prepared.forward_is_collective

    def meets_at_end(self, phase: str) -> bool:
        return phase != "predict" or self.forward_is_collective  # else the loss is a mean over the ranks

    def prepared_modules(self) -> dict[str, Prepared[Any]]:
        mine, modules = self.prepared, self.tracked_modules()
        others = self._recognise({name: module for name, module in modules.items() if without_compile(module) is not mine.module})
        return {name: others.get(name, mine) for name in modules}

    @property
    def data_rank_and_size(self) -> tuple[int, int] | None:
        return self.prepared.data_rank_and_size

    def move_data_to_device(self, state: State, data: Any, non_blocking: bool) -> Any:
        """Put a batch on `self.device`; override for batches of a kind of your own."""
        # To a GPU always: what is not page-locked is copied before this returns. From one, a reader would have to wait.
        return copy_data_to_device(data, self.device, non_blocking=non_blocking or self.device.type == "cuda")

    def placement(self, phase: str) -> tuple[Any, Any]:
        if self.device.type == "cpu" and type(self).move_data_to_device is PreparedUnit.move_data_to_device:
            return None, None  # loaders give host memory: nothing to move, nothing to call per step
        return self.move_data_to_device, self._copies

    @property
    def precision(self) -> Precision:
        """What losses and predictions are computed in."""
        return self.computes

    @precision.setter
    def precision(self, value: object) -> None:
        raise LoopError(f"{type(self).__name__}.precision hides an attribute of AutoUnit. Give yours another name.")

    def autocast(self) -> Any:
        """The context in which losses and predictions are computed."""
        return self.computes.autocast(self.device)
