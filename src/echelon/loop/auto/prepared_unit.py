"""PreparedUnit: a module made parallel and moved to the device, as the loops need it. AutoPredictUnit predicts with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from echelon.contracts.overrides import overrides
from echelon.loop.auto.uncounted import uncounted
from echelon.loop.auto.unit_options import AutoOptions, UnitOptions, options_from
from echelon.loop.state import step_under_way
from echelon.loop.unit import PredictUnit, Unit
from echelon.parallel.names import without_compile
from echelon.parallel.networks import prepare_networks
from echelon.parallel.parallelize import check_module, parallelize
from echelon.parallel.prepared import NO_CONTEXT, Prepared
from echelon.parallel.recipe.activation import Preset
from echelon.parallel.recipe.compilation import Compile
from echelon.parallel.recipe.float8 import Float8
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.strategy import Strategy
from echelon.world.device import copy_data_to_device
from echelon.world.init import init_from_env

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["AutoPredictUnit", "PreparedUnit"]

R = TypeVar("R")
T = TypeVar("T")


class PreparedUnit(Unit):
    """A module made parallel and moved to the device, with the precision in which it computes."""

    reports_own_steps = True
    weighs_padding = True
    has_several = False  # whether it has several optimizers

    def _prepare(self, module: nn.Module, options: AutoOptions) -> None:
        """Make the module parallel and set the attributes that depend on it. Collective."""
        check_module(module)
        decided = overrides()
        self.device = options.device or init_from_env()
        self.computes = Precision.of(decided.precision or options.precision)
        self.detect_anomaly, self.enable_prefetch = options.detect_anomaly, options.prefetch
        compiled: Any = options.compile if decided.compile is not False else None
        recomputed: Any = options.recompute  # AutoOptions has turned names into values
        recipe = Recipe(recomputed, compiled, self.computes)
        make: Callable[..., Prepared[Any]] = prepare_networks if self.has_several else parallelize
        self.prepared = make(module, options.layout, self.device, recipe, overridden=decided.layout)
        made = self.prepared.module
        self.module: nn.Module = module if without_compile(module) is made else made  # keeps the outer torch.compile(DDP(...))
        self._copies = torch.cuda.Stream(self.device) if self.enable_prefetch and self.device.type == "cuda" else None

    @property
    def forward_is_collective(self) -> bool:
        return self.prepared.forward_is_collective

    def meets_at_end(self, phase: str) -> bool:
        return phase != "predict" or self.forward_is_collective  # evaluations and tests average the loss over the ranks

    def prepared_modules(self) -> dict[str, Prepared[Any]]:
        own, modules = self.prepared, self.tracked_modules()
        others = self._recognise({name: module for name, module in modules.items() if without_compile(module) is not own.module})
        return {name: others.get(name, own) for name in modules}

    @property
    def data_rank_and_size(self) -> tuple[int, int] | None:
        return self.prepared.data.rank_and_size

    def move_data_to_device(self, state: State, data: Any, non_blocking: bool) -> Any:
        """Copy a batch to `self.device`; override this for batch types of your own."""
        # Copies to a GPU may always be non-blocking: a source that is not page-locked is copied before this returns. A
        # non-blocking copy from a GPU could be read before it has arrived.
        return copy_data_to_device(data, self.device, non_blocking=non_blocking or self.device.type == "cuda")

    def placement(self, phase: str) -> tuple[Any, Any]:
        if self.device.type == "cpu" and type(self).move_data_to_device is PreparedUnit.move_data_to_device:
            return None, None  # batches are in host memory already: no call per step
        return self.move_data_to_device, self._copies

    @property
    def precision(self) -> Precision:
        """Precision in which losses and predictions are computed."""
        return self.computes

    def autocast(self) -> Any:
        """Autocast context in which losses and predictions are computed."""
        return self.computes.autocast(self.device)


class AutoPredictUnit(PreparedUnit, PredictUnit[T]):
    """Prediction with one module: made parallel, moved to the device, called on each batch under autocast.

    AutoUnit describes the arguments.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        layout: Strategy | str | None = None,
        precision: str | torch.dtype | Precision | Float8 | None = None,
        compile: Compile = None,
        recompute: Preset = None,
        options: UnitOptions | None = None,
        **older: Any,
    ) -> None:
        super().__init__()
        own = {"layout": layout, "precision": precision, "compile": compile, "recompute": recompute}
        self._prepare(module, options_from("AutoPredictUnit", options, older, **own))

    def through_stages(self, state: State, compute: Callable[..., R], *data: Any) -> R:
        """Call `compute(*data)` in a pipeline. A trial pass leaves nothing behind, not in the user's metrics either."""
        with uncounted(self) if self.prepared.batches.dry_run else NO_CONTEXT:
            made: R = state.logged.of_stage(self.prepared, compute, *data)
            return made

    def predict_step(self, state: State, data: T) -> Any:
        """Return the module's outputs for a batch."""
        part = self.prepared.batches.part_of(data)
        is_padding = step_under_way(state.predict_state).is_padding
        if is_padding:
            state.logged.weight = 0
        else:
            state.logged.begins(0 if self.prepared.data.is_replica else 1, "predict")
        with self.autocast():
            outputs = self.prepared.batches.whole_of(self.prepared.forward(part, self.module))
        if not is_padding:
            self.on_predict_step_end(state, data, self.predict_progress.num_steps_completed, outputs)
        return outputs

    def on_predict_step_end(self, state: State, data: T, step: int, outputs: Any) -> None:
        """Called after a prediction step; `step` counts from 0."""
