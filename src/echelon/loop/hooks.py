"""Which hooks of a unit and its callbacks a phase runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echelon.loop.callback import Callback
from echelon.loop.state import State
from echelon.loop.unit import EvalUnit, PredictUnit, TestUnit, TrainUnit, Unit

__all__ = ["KINDS", "Hook", "Hooks", "overrides"]

Hook = Callable[[State, Any], None]

KINDS: dict[str, type[Unit]] = {"train": TrainUnit, "eval": EvalUnit, "predict": PredictUnit, "test": TestUnit}


class Hooks:
    """One phase's hooks, looked up once: only those that somebody overrides, the unit's before the callbacks'."""

    def __init__(self, phase: str, unit: Any, callbacks: list[Callback]) -> None:
        base = KINDS[phase]

        def of(name: str, *, with_unit: bool = True) -> tuple[Hook, ...]:
            hook = f"on_{phase}_{name}"
            found: list[Hook] = []
            own = getattr(unit, hook, None) if with_unit else None
            if own is not None and (hook in vars(unit) or getattr(type(unit), hook) is not getattr(base, hook)):
                found.append(_as_callback(own))
            for callback in callbacks:
                if overrides(callback, hook):
                    found.append(getattr(callback, hook))
            return tuple(found)

        self.start, self.end = of("start"), of("end")
        self.epoch_start, self.epoch_end = of("epoch_start"), of("epoch_end")
        self.iter_start = of("dataloader_iter_creation_start", with_unit=False)
        self.iter_end = of("dataloader_iter_creation_end", with_unit=False)
        self.next_start = of("get_next_batch_start", with_unit=False)
        self.next_end = of("get_next_batch_end", with_unit=False)
        self.step_start = of("step_start", with_unit=False)
        # AutoUnit calls its own, with more arguments, from inside its step.
        self.step_end = of("step_end", with_unit=not unit.reports_own_steps)


def overrides(callback: Callback, hook: str) -> bool:
    """Whether a callback does something in a hook: by a method, or by an attribute of its own."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(Callback, hook)


def _as_callback(own: Callable[[State], None]) -> Hook:
    return lambda state, unit: own(state)
