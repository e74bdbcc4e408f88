"""What AutoUnit does with a batch to evaluate or to test on: its loss is counted by its weight, over all ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from echelon.loop.auto.parts_check import check_parts
from echelon.loop.auto.predicting import AutoPredictUnit
from echelon.loop.auto.standing_in import standing_in
from echelon.loop.records.metrics import MeanOfAPhase
from echelon.loop.state import EntryPoint, step_under_way
from echelon.loop.unit import EvalUnit, TestUnit
from echelon.parallel.prepared import NO_CONTEXT

if TYPE_CHECKING:
    from echelon.loop.state import PhaseState, State

__all__ = ["AutoEvalUnit"]

T = TypeVar("T")


class AutoEvalUnit(AutoPredictUnit[T], EvalUnit[T], TestUnit[T]):
    """The steps of AutoUnit's evaluations and tests."""

    compute_loss: Any
    weight: Any
    train_progress: Any
    _evaluation: MeanOfAPhase
    _samples: int | None

    def eval_step(self, state: State, data: T) -> tuple[torch.Tensor, Any]:
        """The loss of a batch, counted into `eval_loss` by its weight."""
        data, loss, outputs, counts = self._evaluate(state, data, state.eval_state)
        if counts:
            step = (self.train_progress if state.entry_point is EntryPoint.FIT else self.eval_progress).num_steps_completed
            self.on_eval_step_end(state, data, step, loss, outputs)
        return loss, outputs

    def test_step(self, state: State, data: T) -> tuple[torch.Tensor, Any]:
        """As `eval_step`, counted into `test_loss`."""
        data, loss, outputs, counts = self._evaluate(state, data, state.test_state)
        if counts:
            self.on_test_step_end(state, data, self.test_progress.num_steps_completed, loss, outputs)
        return loss, outputs

    def _evaluate(self, state: State, batch: T, phase: PhaseState | None) -> tuple[T, torch.Tensor, Any, bool]:
        """This rank's part of the batch, its loss and outputs, and whether it counts: not if it is padding."""
        if self.prepared.doubts_parts:
            check_parts(self, state, batch)
        data = self.prepared.part_of(batch)
        counts = not step_under_way(phase).is_padding
        self._samples = step_under_way(phase).samples
        weight = self.weight(data) if counts and not self.prepared.is_replica else 0
        compute = partial(self._compute, state, weight)
        if self.prepared.takes_windows:
            compute = partial(self.through_stages, state, compute)
        with self.autocast(), NO_CONTEXT if counts else standing_in(self):
            loss, outputs = self.prepared.forward(data, compute)
        if counts:
            self._evaluation.mean.update(loss, weight)
        return data, loss, outputs, counts

    def _compute(self, state: State, weight: Any, data: T) -> tuple[torch.Tensor, Any]:
        state.logged.begins(weight, str(state.active_phase))
        made: tuple[torch.Tensor, Any] = self.compute_loss(state, data)
        return made

    def on_eval_step_end(self, state: State, data: T, step: int, loss: torch.Tensor, outputs: Any) -> None:
        """After an evaluation step; within `fit`, `step` is the number of training steps so far."""

    def on_test_step_end(self, state: State, data: T, step: int, loss: torch.Tensor, outputs: Any) -> None:
        """After a test step."""
