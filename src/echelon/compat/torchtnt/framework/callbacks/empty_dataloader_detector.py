"""torchtnt.framework.callbacks.empty_dataloader_detector: epochs without a batch."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from echelon.common.errors import DataError, UsageError
from echelon.loop.callback import Callback
from echelon.loop.callbacks.intervals import at_least
from echelon.loop.progress import Progress
from echelon.loop.state import State

__all__ = ["EmptyDataloaderDetectorCallback"]

logger = logging.getLogger(__name__)


class EmptyDataloaderDetectorCallback(Callback):
    """Warns of an epoch whose loader gave nothing, and ends the run after several in a row.

    Args:
        threshold: how many empty epochs in a row, of training, of evaluations or of predictions.
        raise_exception: False only warns, of these too.
    Raises:
        DataError, a RuntimeError: so many were empty.
    """

    may_stop = False

    def __init__(self, threshold: int = 2, raise_exception: bool = True) -> None:
        if threshold <= 0:
            raise UsageError("threshold must be a positive integer")
        at_least(1, threshold=threshold)
        self._threshold, self._raises = threshold, raise_exception
        self._empty: Counter[str] = Counter()

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        self._count("train", unit.train_progress)

    def on_eval_epoch_end(self, state: State, unit: Any) -> None:
        self._count("eval", unit.eval_progress)

    def on_predict_epoch_end(self, state: State, unit: Any) -> None:
        self._count("predict", unit.predict_progress)

    def _count(self, phase: str, progress: Progress) -> None:
        if progress.num_steps_completed_in_prev_epoch:
            self._empty[phase] = 0
            return
        self._empty[phase] += 1
        empty = self._empty[phase]
        logger.warning(
            "Empty %s epoch detected! Epoch %s completed 0 steps. Consecutive empty %s epochs: %s",
            *(phase, progress.num_epochs_completed, phase, empty),
        )
        if empty < self._threshold:
            return
        told = (
            f"Detected {empty} consecutive empty {phase} epochs, which exceeds the threshold of {self._threshold}. Is the loader "
            "a used-up iterator, its dataset empty, or smaller than a batch with drop_last?"
        )
        if self._raises:
            raise DataError(told)
        logger.warning(told)
