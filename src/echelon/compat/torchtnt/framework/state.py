"""torchtnt.framework.state. Attributes that programs set by private names, since TorchTNT has no other, can be set here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

from echelon.common.errors import UsageError
from echelon.common.numbers import whole
from echelon.compat.torchtnt.utils.helpers import private_names
from echelon.loop import state
from echelon.loop.state import ActivePhase, EntryPoint

__all__ = ["ActivePhase", "EntryPoint", "PhaseState", "State", "TPhaseState", "check_limits"]


class _Core(type):
    """Counts echelon's own objects, which the loops make, as instances."""

    def __instancecheck__(cls, it: Any) -> bool:
        return isinstance(it, cls.__mro__[1])


def check_limits(**limits: Any) -> None:
    """
    Raises:
        UsageError: a limit is neither a whole number of at least 0, nor None or infinity.
    """
    for name, value in limits.items():
        try:
            if value is not None and value != math.inf:
                whole(name, value, at_least=0)
        except UsageError:
            raise UsageError(
                f"Invalid value provided for {name}. Expected a non-negative integer or None, but received {value!r}."
            ) from None


class PhaseState(state.PhaseState, metaclass=_Core):
    """As echelon's. 0 as `evaluate_every_n_steps` or `evaluate_every_n_epochs` never evaluates."""

    iteration_timer: Any = None
    locals().update(dict.fromkeys(("dataloader", "max_epochs", "max_steps", "max_steps_per_epoch", "step_output")))  # for a mock

    def __init__(
        self,
        *,
        dataloader: Iterable[Any],
        evaluate_every_n_steps: float | None = None,
        evaluate_every_n_epochs: float | None = None,
        **limits: Any,
    ) -> None:
        evaluations = {"evaluate_every_n_steps": evaluate_every_n_steps, "evaluate_every_n_epochs": evaluate_every_n_epochs}
        check_limits(**limits, **evaluations)
        super().__init__(dataloader=dataloader, **limits, **{name: every or None for name, every in evaluations.items()})

    locals().update(
        private_names("dataloader", "max_epochs", "max_steps", "max_steps_per_epoch", "step_output", "iteration_timer"),
        **private_names("evaluate_every_n_steps", "evaluate_every_n_epochs"),
    )


class State(state.State, metaclass=_Core):
    """As echelon's. A mock with this class as its spec has the attributes of its objects."""

    locals().update(dict.fromkeys(("train_state", "eval_state", "predict_state", "logged", "recorder", "notes", "settle_logged")))
    locals().update(dict.fromkeys(("entry_point", "active_phase", "timer", "should_stop", "stop_requested")))
    locals().update(
        private_names("entry_point", "active_phase", "timer", "train_state", "eval_state", "predict_state", "should_stop")
    )


TPhaseState: TypeAlias = PhaseState
