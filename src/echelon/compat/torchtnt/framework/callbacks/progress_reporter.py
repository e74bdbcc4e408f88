"""torchtnt.framework.callbacks.progress_reporter."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from echelon.loop.callback import Callback
from echelon.loop.state import EntryPoint, State
from echelon.observe.loggers.logger import rank as this_rank

__all__ = ["ProgressReporter"]

logger = logging.getLogger(__name__)

_PHASES = {
    EntryPoint.FIT: ("train", "eval"),
    EntryPoint.TRAIN: ("train",),
    EntryPoint.EVALUATE: ("eval",),
    EntryPoint.PREDICT: ("predict",),
    EntryPoint.TEST: ("test",),
}


def _report(hook: str) -> Callable[[Any, State, Any], None]:
    def report(self: Any, state: State, unit: Any) -> None:
        if logger.isEnabledFor(logging.INFO):
            told = (f"{p.capitalize()} progress: {_progress(unit, p).get_progress_string()}" for p in _PHASES[state.entry_point])
            logger.info("Progress Reporter: rank %s at %s. %s", this_rank(), hook, " ".join(told))

    return report


def _progress(unit: Any, phase: str) -> Any:
    return getattr(unit, f"{phase}_progress")


class ProgressReporter(Callback):
    """Every rank logs where it is at each hook, as INFO: to find the one that hangs, and where."""

    may_stop = False


for _phase in ("train", "eval", "predict", "test"):
    for _moment in ("start", "epoch_start", "step_start", "step_end", "epoch_end", "end"):
        setattr(ProgressReporter, f"on_{_phase}_{_moment}", _report(f"on_{_phase}_{_moment}"))
