"""One phase of a run: its unit, callbacks, state and hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from echelon.loop.callback import Callback
from echelon.loop.progress import Progress
from echelon.loop.state import PhaseState, State, TimerProtocol
from echelon.loop.unit import Unit
from echelon.loop.validate import KINDS, has_hook, keeps

__all__ = ["Stage"]


@dataclass(frozen=True)
class Stage:
    """One phase of a run.

    Args:
        phase: "train", "eval", "predict" or "test".
        unit: the user's unit, or a mock of one.
        inner: answers the loop's own questions about the unit.
    """

    phase: str
    state: State
    unit: Any
    inner: Unit
    callbacks: Sequence[Callback]
    hooks: Hooks

    @property
    def phase_state(self) -> PhaseState:
        phase_state: PhaseState = getattr(self.state, f"{self.phase}_state")
        return phase_state

    @property
    def progress(self) -> Progress:
        progress: Progress = getattr(self.unit, f"{self.phase}_progress")
        return progress

    @property
    def trains(self) -> bool:
        return self.phase == "train"

    @property
    def entry(self) -> str:
        """Name of the public function that runs this phase; a timer's names begin with it."""
        return "evaluate" if self.phase == "eval" else self.phase

    def call(self, hooks: tuple[Hook, ...]) -> None:
        for hook in hooks:
            hook(self.state, self.unit)


# --- the hooks that a phase runs


P = ParamSpec("P")
R = TypeVar("R")

Hook = Callable[[State, Any], None]


class Hooks:
    """One phase's hooks, looked up once: only overridden ones, the unit's before the callbacks'.

    Args:
        timer: times each of them, under "MyUnit.on_train_start" and "callback.MyCallback.on_train_start".
    """

    def __init__(self, phase: str, unit: Any, callbacks: list[Any], timer: TimerProtocol | None = None) -> None:
        base = KINDS[phase]

        def of(name: str, *, with_unit: bool = True) -> tuple[Hook, ...]:
            hook = f"on_{phase}_{name}"
            hooks: list[Hook] = []
            if with_unit and hasattr(base, hook) and not keeps(unit, hook, base):
                hooks.append(timed(timer, f"{type(unit).__name__}.{hook}", _as_callback(getattr(unit, hook))))
            for callback in callbacks:
                if has_hook(callback, hook):
                    hooks.append(timed(timer, f"callback.{_name_of(callback)}.{hook}", getattr(callback, hook)))
            return tuple(hooks)

        self.start, self.end = of("start"), of("end")
        self.epoch_start, self.epoch_end = of("epoch_start"), of("epoch_end")
        self.iter_start = of("dataloader_iter_creation_start", with_unit=False)
        self.iter_end = of("dataloader_iter_creation_end", with_unit=False)
        self.next_start = of("get_next_batch_start", with_unit=False)
        self.next_end = of("get_next_batch_end", with_unit=False)
        self.step_start = of("step_start", with_unit=False)
        # AutoUnit calls its own on_*_step_end from inside its step, with more arguments.
        self.step_end = of("step_end", with_unit=not getattr(unit.__class__, "reports_own_steps", False))


def _as_callback(own: Callable[[State], None]) -> Hook:
    return lambda state, unit: own(state)


def timed(timer: TimerProtocol | None, name: str, call: Callable[P, R]) -> Callable[P, R]:
    """Wrap `call` so that the timer measures it under `name`; without a timer, return `call` itself."""
    if timer is None:
        return call

    def with_time(*args: P.args, **kwargs: P.kwargs) -> R:
        with timer.time(name):
            return call(*args, **kwargs)

    return with_time


def _name_of(callback: Any) -> str:
    name = getattr(callback, "name", None)
    return name if isinstance(name, str) else type(callback).__name__
