"""One phase of a run: what its epochs, its batches and its steps are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from echelon.loop.callback import Callback
from echelon.loop.hooks import Hook, Hooks
from echelon.loop.progress import Progress
from echelon.loop.state import PhaseState, State
from echelon.loop.unit import Unit

__all__ = ["Stage"]


@dataclass(frozen=True)
class Stage:
    """
    Args:
        phase: "train", "eval", "predict" or "test".
        unit: the user's, or a mock of one.
        inner: what answers the loop's own questions for it.
    """

    phase: str
    state: State
    unit: Any
    inner: Unit
    callbacks: Sequence[Callback]
    hooks: Hooks

    @property
    def here(self) -> PhaseState:
        here: PhaseState = getattr(self.state, f"{self.phase}_state")
        return here

    @property
    def progress(self) -> Progress:
        progress: Progress = getattr(self.unit, f"{self.phase}_progress")
        return progress

    @property
    def trains(self) -> bool:
        return self.phase == "train"

    @property
    def entry(self) -> str:
        """The function that has this phase, by which a timer's names begin."""
        return "evaluate" if self.phase == "eval" else self.phase

    def call(self, hooks: tuple[Hook, ...]) -> None:
        for hook in hooks:
            hook(self.state, self.unit)
