"""torchtnt.framework.callbacks.tqdm_progress_bar: a tqdm bar for each epoch."""

from __future__ import annotations

from typing import Any, TextIO

from echelon.contracts.errors import UsageError
from echelon.loop.callback import Callback
from echelon.loop.callbacks.steps import at_least, progress_of
from echelon.loop.state import ActivePhase, State
from echelon.world import agree

__all__ = ["TQDMProgressBar"]

_NAMES = {
    ActivePhase.TRAIN: "Train Epoch",
    ActivePhase.EVALUATE: "Eval Epoch",
    ActivePhase.PREDICT: "Predict Epoch",
    ActivePhase.TEST: "Test Epoch",
}


class TQDMProgressBar(Callback):
    """Rank 0 draws a bar for every epoch, one that is resumed in its middle included. On a terminal echelon draws progress by
    itself; this is for a notebook, or a file.

    Args:
        refresh_rate: draw after every so many steps.
        file: where to; by default standard error.
        mininterval: seconds between two drawings at the least; by default tqdm's.
    Raises:
        UsageError: tqdm is not installed.
    """

    may_stop = False

    def __init__(self, refresh_rate: int = 1, file: TextIO | None = None, *, mininterval: float | None = None) -> None:
        at_least(1, refresh_rate=refresh_rate)
        try:
            from tqdm.auto import tqdm
        except ImportError:
            raise UsageError("TQDMProgressBar needs tqdm: pip install 'echelon[tqdm]'.") from None
        self._tqdm, self._refresh_rate, self._file = tqdm, refresh_rate, file
        self._options = {} if mininterval is None else {"mininterval": mininterval}
        self._bars: dict[ActivePhase, Any] = {}

    def on_train_dataloader_iter_creation_end(self, state: State, unit: Any) -> None:
        # Not at the start of an epoch: one that is resumed has none.
        self._close(state, unit)
        here = state.active_phase_state()
        if not agree.is_rank0() or here is None:
            return
        progress, left = progress_of(state, unit), here.feed.total if here.feed is not None else None
        done = progress.num_steps_completed_in_epoch
        self._bars[state.active_phase] = self._tqdm(
            desc=f"{_NAMES[state.active_phase]} {progress.num_epochs_completed}",
            total=None if left is None else done + left,
            initial=done,
            file=self._file,
            **self._options,
        )

    def on_train_step_end(self, state: State, unit: Any) -> None:
        bar = self._bars.get(state.active_phase)
        if bar is not None:
            done = progress_of(state, unit).num_steps_completed_in_epoch
            if done % self._refresh_rate == 0:
                bar.update(done - bar.n)

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        bar = self._bars.get(state.active_phase)
        if bar is not None:  # the progress has begun to count the next epoch
            bar.update(progress_of(state, unit).num_steps_completed_in_prev_epoch - bar.n)
        self._close(state, unit)

    def _close(self, state: State, unit: Any) -> None:
        """Of an epoch that was cut short as well."""
        bar = self._bars.pop(state.active_phase, None)
        if bar is not None:
            bar.close()

    on_train_end = on_eval_end = on_predict_end = on_test_end = _close

    def on_exception(self, state: State, unit: Any, exc: BaseException) -> None:
        while self._bars:
            self._bars.popitem()[1].close()

    on_eval_dataloader_iter_creation_end = on_predict_dataloader_iter_creation_end = on_train_dataloader_iter_creation_end
    on_test_dataloader_iter_creation_end = on_train_dataloader_iter_creation_end
    on_eval_step_end = on_predict_step_end = on_test_step_end = on_train_step_end
    on_eval_epoch_end = on_predict_epoch_end = on_test_epoch_end = on_train_epoch_end
