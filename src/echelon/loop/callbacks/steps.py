"""How many steps a run has taken, for callbacks that do something every n-th."""

from __future__ import annotations

from typing import Any

from echelon.contracts.errors import UsageError
from echelon.loop.progress import Progress
from echelon.loop.state import ActivePhase, EntryPoint, State

__all__ = ["at_least", "progress_of", "steps_so_far"]

_PHASES = {
    ActivePhase.TRAIN: "train",
    ActivePhase.EVALUATE: "eval",
    ActivePhase.PREDICT: "predict",
    ActivePhase.TEST: "test",
}


def progress_of(state: State, unit: Any) -> Progress:
    """The progress of the phase that runs now."""
    progress: Progress = getattr(unit, f"{_PHASES[state.active_phase]}_progress")
    return progress


def steps_so_far(state: State, unit: Any) -> int:
    """Steps of the phase that runs now; within `fit`, of training and evaluation together."""
    if state.entry_point is EntryPoint.FIT:
        return int(unit.train_progress.num_steps_completed + unit.eval_progress.num_steps_completed)
    return progress_of(state, unit).num_steps_completed


def at_least(least: int, **values: int | None) -> None:
    """
    Raises:
        UsageError: one of the values is less, or no whole number; None is left out.
    """
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or value < least):
            raise UsageError(f"{name} must be at least {least}, got {value!r}")
