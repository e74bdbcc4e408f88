"""How many steps a run has taken, for callbacks that do something every n-th, or as epochs or steps begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from echelon.contracts.errors import UsageError
from echelon.loop.callback import Callback
from echelon.loop.progress import Progress
from echelon.loop.state import ActivePhase, EntryPoint, State
from echelon.observe.loggers.logger import MetricLogger

__all__ = ["LogsAtInterval", "at_least", "progress_of", "steps_so_far"]

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


class LogsAtInterval(Callback):
    """Base of callbacks that log as epochs or steps begin.

    Args:
        loggers: one or several.
        logging_interval: "epoch" or "step".
    """

    may_stop = False

    def __init__(
        self, loggers: MetricLogger | Sequence[MetricLogger], *, logging_interval: Literal["epoch", "step"] = "epoch"
    ) -> None:
        if logging_interval not in ("epoch", "step"):
            raise UsageError(
                f"Invalid value {logging_interval!r} for argument logging_interval. Accepted values are epoch, step."
            )
        self._loggers = list(loggers) if isinstance(loggers, Sequence) else [loggers]
        self._interval = logging_interval
