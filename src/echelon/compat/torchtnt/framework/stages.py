"""The stages of AutoUnit's and AutoPredictUnit's steps, in the user's timer by TorchTNT's names."""

from __future__ import annotations

from typing import Any

from echelon.compat.torchtnt.framework.runs import tell_of_closed, tell_of_epoch, tell_of_phase
from echelon.parallel.prepared import NO_CONTEXT

__all__ = ["PredictStages", "TrainStages"]


class _Stages:
    """Before echelon's unit among the bases."""

    prepared: Any
    clip_grad_norm: float | None
    clip_grad_value: float | None
    move_data_to_device: Any

    _timer: Any = None

    def timed(self, stage: str, state: Any = None) -> Any:
        """Context of a stage: of a step that is given a state, or of what the loop does around steps."""
        timer = self._timer if state is None else state.timer
        return NO_CONTEXT if timer is None else timer.time(f"{type(self).__name__}.{stage}")

    def phase_started(self, state: Any, phase: str) -> None:
        self._timer = state.timer
        tell_of_phase(state, phase)
        super().phase_started(state, phase)  # type: ignore[misc]

    def epoch_closed(self, state: Any, phase: str) -> None:
        super().epoch_closed(state, phase)  # type: ignore[misc]
        tell_of_closed(self, state, phase)

    def placement(self, phase: str) -> tuple[Any, Any]:
        """With a timer, batches are moved by a call of their own, though they be where they should: it is a stage there."""
        tell_of_epoch(phase)
        move, stream = super().placement(phase)  # type: ignore[misc]
        return (self.move_data_to_device if move is None and self._timer is not None else move), stream

    def predict_step(self, state: Any, data: Any) -> Any:
        with self.timed("forward", state):
            return super().predict_step(state, data)  # type: ignore[misc]


class PredictStages(_Stages):
    """Of AutoPredictUnit."""


class TrainStages(_Stages):
    """Of AutoUnit."""

    def _forward(self, state: Any, micro_batch: Any) -> Any:
        with self.timed("compute_loss", state):
            return super()._forward(state, micro_batch)  # type: ignore[misc]

    def _backward(self, state: Any, loss: Any, micro_batch: Any) -> None:
        with self.timed("backward", state):
            super()._backward(state, loss, micro_batch)  # type: ignore[misc]

    def _clip(self) -> Any:
        prepared, norm = self.prepared, None
        if self.clip_grad_norm is not None:
            with self.timed("clip_grad_norm"):
                norm = prepared.clip_grad_norm_(self.clip_grad_norm)
        if self.clip_grad_value is not None:
            with self.timed("clip_grad_value"):
                prepared.clip_grad_value_(self.clip_grad_value)
        return norm

    def _step_optimizer(self) -> bool:
        with self.timed("optimizer_step"):
            return bool(super()._step_optimizer())  # type: ignore[misc]

    def zero_grad(self, state: Any) -> None:
        with self.timed("optimizer_zero_grad", state):
            super().zero_grad(state)  # type: ignore[misc]

    def eval_step(self, state: Any, data: Any) -> Any:
        with self.timed("compute_loss", state):
            return super().eval_step(state, data)  # type: ignore[misc]
