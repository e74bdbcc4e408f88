"""torchtnt.framework.state. What programs set there under private names, having no other, they can set here."""

from __future__ import annotations

from typing import Any, TypeAlias

from echelon.loop import state
from echelon.loop.state import ActivePhase, EntryPoint

__all__ = ["ActivePhase", "EntryPoint", "PhaseState", "State", "TPhaseState"]


class _Core(type):
    """The loops make echelon's own objects: they are instances too."""

    def __instancecheck__(cls, it: Any) -> bool:
        return isinstance(it, cls.__mro__[1])


def _private(*names: str) -> dict[str, property]:
    def of(name: str) -> property:
        return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))

    return {f"_{name}": of(name) for name in names}


class PhaseState(state.PhaseState, metaclass=_Core):
    """As echelon's."""

    locals().update(
        _private("dataloader", "max_epochs", "max_steps", "max_steps_per_epoch", "step_output", "iteration_timer"),
        **_private("evaluate_every_n_steps", "evaluate_every_n_epochs"),
    )


class State(state.State, metaclass=_Core):
    """As echelon's."""

    locals().update(_private("entry_point", "active_phase", "timer", "train_state", "eval_state", "predict_state", "should_stop"))


TPhaseState: TypeAlias = PhaseState
