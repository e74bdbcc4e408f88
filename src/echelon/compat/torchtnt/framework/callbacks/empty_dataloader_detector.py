"""torchtnt.framework.callbacks.empty_dataloader_detector: epochs without a batch."""

from __future__ import annotations

from typing import Any

from echelon.contracts.errors import DataError
from echelon.loop.callback import Callback
from echelon.loop.callbacks.steps import at_least
from echelon.loop.state import State

__all__ = ["EmptyDataloaderDetectorCallback"]


class EmptyDataloaderDetectorCallback(Callback):
    """Ends a run whose loader gives nothing, epoch after epoch; otherwise that is a warning only.

    Args:
        threshold: how many empty epochs in a row of training, or calls of `predict`.
    Raises:
        DataError: so many were empty.
    """

    may_stop = False

    def __init__(self, threshold: int = 2) -> None:
        at_least(1, threshold=threshold)
        self._threshold = threshold
        self._empty = {"train": 0, "predict": 0}

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        self._count("train", unit.train_progress.num_steps_completed_in_prev_epoch)

    def on_predict_epoch_end(self, state: State, unit: Any) -> None:
        self._count("predict", unit.predict_progress.num_steps_completed_in_prev_epoch)

    def _count(self, phase: str, steps: int) -> None:
        self._empty[phase] = 0 if steps else self._empty[phase] + 1
        if self._empty[phase] >= self._threshold:
            raise DataError(
                f"{self._empty[phase]} {phase} epochs in a row had no batch. Is the loader a used-up iterator, its dataset "
                "empty, or smaller than a batch with drop_last?"
            )
