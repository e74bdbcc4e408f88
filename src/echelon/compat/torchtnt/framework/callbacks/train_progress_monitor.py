"""torchtnt.framework.callbacks.train_progress_monitor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echelon.loop.callback import Callback
from echelon.loop.state import State
from echelon.observe.loggers.logger import MetricLogger

__all__ = ["TrainProgressMonitor"]


class TrainProgressMonitor(Callback):
    """Logs the number of training steps over the number of epochs: "Training steps completed vs epochs".

    Args:
        loggers: one or several.
    """

    may_stop = False

    def __init__(self, loggers: MetricLogger | Sequence[MetricLogger]) -> None:
        self._loggers = list(loggers) if isinstance(loggers, Sequence) else [loggers]

    def on_train_start(self, state: State, unit: Any) -> None:
        progress = unit.train_progress
        for each in self._loggers:
            each.log("Training steps completed vs epochs", progress.num_steps_completed, progress.num_epochs_completed)

    on_train_epoch_end = on_train_start
