"""How many steps a run has taken, for callbacks that do something every n-th, or as epochs or steps begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from echelon.common.arguments import several
from echelon.common.errors import CallbackError
from echelon.common.numbers import whole
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
        if value is not None:
            whole(name, value, at_least=least, kind=CallbackError)


def _can_log(logger: Any) -> bool:
    return callable(getattr(logger, "log_dict", None))


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
            raise CallbackError(
                f"Invalid value '{logging_interval}' for argument logging_interval. Accepted values are ('epoch', 'step')."
            )
        given = [loggers] if _can_log(loggers) else loggers
        self._loggers = several("loggers", given, "a logger or a list of loggers", _can_log, kind=CallbackError)
        self.logging_interval = logging_interval
