"""torchtnt.framework.callbacks.tqdm_progress_bar: a tqdm bar for each epoch."""

from __future__ import annotations

from typing import Any, TextIO

from echelon.contracts.errors import UsageError
from echelon.data.prefetch import known_length
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

    def on_train_epoch_start(self, state: State, unit: Any) -> None:
        progress, here = progress_of(state, unit), state.active_phase_state()
        if here is not None:
            before = progress.num_steps_completed - progress.num_steps_completed_in_epoch
            ends = (known_length(here.dataloader), here.max_steps_per_epoch, here.max_steps and here.max_steps - before)
            self._open(state, unit, min((end for end in ends if end is not None), default=None))

    def on_train_dataloader_iter_creation_end(self, state: State, unit: Any) -> None:
        here = state.active_phase_state()
        left = here.feed.total if here is not None and here.feed is not None else None
        done = progress_of(state, unit).num_steps_completed_in_epoch
        total = None if left is None else done + left
        if done:  # an epoch that is resumed has no start
            self._open(state, unit, total)
        elif (bar := self._bars.get(state.active_phase)) is not None:
            bar.total = total

    def _open(self, state: State, unit: Any, total: int | None) -> None:
        self._close(state, unit)
        if agree.is_rank0():
            progress = progress_of(state, unit)
            self._bars[state.active_phase] = self._tqdm(
                desc=f"{_NAMES[state.active_phase]} {progress.num_epochs_completed}",
                total=total,
                initial=progress.num_steps_completed_in_epoch,
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
            bar.update(max(0, progress_of(state, unit).num_steps_completed_in_prev_epoch - bar.n))
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

    on_eval_epoch_start = on_predict_epoch_start = on_test_epoch_start = on_train_epoch_start
    on_eval_dataloader_iter_creation_end = on_predict_dataloader_iter_creation_end = on_train_dataloader_iter_creation_end
    on_test_dataloader_iter_creation_end = on_train_dataloader_iter_creation_end
    on_eval_step_end = on_predict_step_end = on_test_step_end = on_train_step_end
    on_eval_epoch_end = on_predict_epoch_end = on_test_epoch_end = on_train_epoch_end
