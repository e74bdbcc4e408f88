"""AutoPredictUnit: a module made parallel and called on batches, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from echelon.loop.auto.prepared_unit import PreparedUnit
from echelon.loop.auto.standing_in import uncounted
from echelon.loop.auto.unit_options import UnitOptions, options_from
from echelon.loop.state import step_under_way
from echelon.loop.unit import PredictUnit
from echelon.parallel.prepared import NO_CONTEXT
from echelon.parallel.recipe.activation import Preset
from echelon.parallel.recipe.float8 import Float8
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.recipe.recipe import Compile
from echelon.parallel.strategy import Strategy

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["AutoPredictUnit"]

R = TypeVar("R")
T = TypeVar("T")


class AutoPredictUnit(PreparedUnit, PredictUnit[T]):
    """Prediction with one module: made parallel, moved to the device, called on each batch under autocast.

    The arguments are AutoUnit's, which describes them.
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
        """`compute(*data)` in a pipeline. Of a trial pass nothing stays, also in metrics of the user's own."""
        with uncounted(self) if self.prepared.batches.is_trying else NO_CONTEXT:
            made: R = state.logged.of_stage(self.prepared, compute, *data)
            return made

    def predict_step(self, state: State, data: T) -> Any:
        """The module's outputs for a batch."""
        part = self.prepared.batches.part_of(data)
        is_padding = step_under_way(state.predict_state).is_padding
        if is_padding:
            state.logged.weight = 0
        else:
            state.logged.begins(0 if self.prepared.is_replica else 1, "predict")
        with self.autocast():
            outputs = self.prepared.batches.whole_of(self.prepared.forward(part, self.module))
        if not is_padding:
            self.on_predict_step_end(state, data, self.predict_progress.num_steps_completed, outputs)
        return outputs

    def on_predict_step_end(self, state: State, data: T, step: int, outputs: Any) -> None:
        """After a prediction step; `step` counts from 0."""
