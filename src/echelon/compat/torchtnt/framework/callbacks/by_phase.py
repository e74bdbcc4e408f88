"""Callbacks that do the same in every phase, told which by the hook that is called.

Not by `state.active_phase`: programs call hooks themselves, with a State that no loop has touched, or a mock of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from echelon.loop.progress import Progress
from echelon.loop.state import EntryPoint, State

__all__ = ["by_phase", "progress_of", "state_of", "steps_so_far"]

C = TypeVar("C", bound=type)

_PHASES = ("train", "eval", "predict", "test")


def by_phase(*moments: str) -> Callable[[C], C]:
    """Decorator of a class: for "step_end", all of `on_<phase>_step_end` call its `step_end(state, unit, phase)`."""

    def give(cls: C) -> C:
        for phase in _PHASES:
            for moment in moments:
                setattr(cls, f"on_{phase}_{moment}", _hook(phase, moment))
        return cls

    return give


def _hook(phase: str, moment: str) -> Callable[[Any, State, Any], None]:
    def hook(self: Any, state: State, unit: Any) -> None:
        getattr(self, moment)(state, unit, phase)

    return hook


def state_of(state: State, phase: str) -> Any:
    """The phase's PhaseState."""
    return getattr(state, f"{phase}_state")


def progress_of(unit: Any, phase: str) -> Progress:
    """The unit's progress in the phase."""
    progress: Progress = getattr(unit, f"{phase}_progress")
    return progress


def steps_so_far(state: State, unit: Any, phase: str) -> int:
    """Steps of the phase; within `fit`, of training and evaluation together."""
    if state.entry_point is EntryPoint.FIT:
        return int(unit.train_progress.num_steps_completed + unit.eval_progress.num_steps_completed)
    return progress_of(unit, phase).num_steps_completed
