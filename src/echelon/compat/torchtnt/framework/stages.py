"""The stages of AutoUnit's and AutoPredictUnit's steps, in the user's timer under TorchTNT's names."""

from __future__ import annotations

from typing import Any

import torch

from echelon.loop.auto.update import Update
from echelon.parallel.prepared import NO_CONTEXT, MicroBatch

__all__ = ["PredictStages", "TrainStages"]


class PredictStages:
    """AutoPredictUnit's stages. The class comes before echelon's unit among the bases."""

    move_data_to_device: Any
    precision: Any = property(lambda self: self.computes.dtype)  # the type of autocast; None computes in float32

    _timer: Any = None

    def timed(self, stage: str, state: Any = None) -> Any:
        """Context of a stage: of a step, if `state` is given, else of what the loop does around steps."""
        timer = self._timer if state is None else state.timer
        return NO_CONTEXT if timer is None else timer.time(f"{type(self).__name__}.{stage}")

    def times(self, state: Any) -> None:
        """Use the state's timer from now on."""
        self._timer = state.timer

    def phase_started(self, state: Any, phase: str) -> None:
        self.times(state)
        super().phase_started(state, phase)  # type: ignore[misc]

    def placement(self, phase: str) -> tuple[Any, Any]:
        """With a timer, move batches even if they are in place already: in TorchTNT the move is a stage."""
        move, stream = super().placement(phase)  # type: ignore[misc]
        return (self.move_data_to_device if move is None and self._timer is not None else move), stream

    def predict_step(self, state: Any, data: Any) -> Any:
        with self.timed("forward", state):
            return super().predict_step(state, data)  # type: ignore[misc]


class TimedUpdate(Update):
    """The update, with its stages in the timer."""

    def forward(self, unit: Any, state: Any, micro_batch: MicroBatch[Any]) -> tuple[torch.Tensor, Any]:
        with unit.timed("compute_loss", state):
            return super().forward(unit, state, micro_batch)

    def backward(
        self, unit: Any, state: Any, loss: torch.Tensor, micro_batch: MicroBatch[Any], *, retain_graph: bool | None = None
    ) -> None:
        with unit.timed("backward", state):
            super().backward(unit, state, loss, micro_batch, retain_graph=retain_graph)

    def complete(self, unit: Any, state: Any) -> torch.Tensor | None:
        unit.times(state)  # also for a step that a program calls itself, without a loop
        return super().complete(unit, state)

    def clip_norm(self, unit: Any, most: float) -> torch.Tensor:
        with unit.timed("clip_grad_norm"):
            return super().clip_norm(unit, most)

    def clip_value(self, unit: Any, most: float) -> None:
        with unit.timed("clip_grad_value"):
            super().clip_value(unit, most)

    def step_optimizer(self, unit: Any) -> bool:
        with unit.timed("optimizer_step"):
            return super().step_optimizer(unit)

    def advance(self, unit: Any) -> None:
        averaged = unit.swa_scheduler is not None and unit.swa_model is not None and unit.swa_model.begun
        with unit.timed("swa_lr_scheduler_step" if averaged else "lr_scheduler_step"):
            super().advance(unit)


class TrainStages(PredictStages):
    """AutoUnit's stages."""

    kind_of_update: type[Update] = TimedUpdate

    def zero_grad(self, state: Any) -> None:
        with self.timed("optimizer_zero_grad", state):
            super().zero_grad(state)  # type: ignore[misc]

    def eval_step(self, state: Any, data: Any) -> Any:
        with self.timed("compute_loss", state):
            return super().eval_step(state, data)  # type: ignore[misc]
