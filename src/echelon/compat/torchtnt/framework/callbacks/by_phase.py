"""Callbacks that do the same in every phase, told which by the hook that is called.

Not by `state.active_phase`: programs call hooks themselves, with a State that no loop has touched, or a mock of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from echelon.loop.state import State

__all__ = ["by_phase"]

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
