"""torchtnt.framework.callbacks.tqdm_progress_bar: a tqdm bar for each epoch."""

from __future__ import annotations

from typing import Any, TextIO

from echelon.common.errors import CallbackError, UsageError
from echelon.common.numbers import whole
from echelon.compat.torchtnt.framework.callbacks.by_phase import by_phase, progress_of, state_of
from echelon.data.prefetch import known_length
from echelon.loop.callback import Callback
from echelon.loop.state import PhaseState, State
from echelon.world import agree

__all__ = ["TQDMProgressBar"]


@by_phase("epoch_start", "dataloader_iter_creation_end", "step_end", "epoch_end", "end")
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
        whole("refresh_rate", refresh_rate, at_least=1, kind=CallbackError)
        try:
            from tqdm.auto import tqdm
        except ImportError:
            raise UsageError("TQDMProgressBar needs tqdm: pip install 'echelon[tqdm]'.") from None
        self._tqdm, self._refresh_rate, self._file = tqdm, refresh_rate, file
        self._options = {} if mininterval is None else {"mininterval": mininterval}
        self._bars: dict[str, Any] = {}
        self._opened: dict[str, Any] = {}

    _train_progress_bar = property(lambda self: self._opened.get("train"))
    _eval_progress_bar = property(lambda self: self._opened.get("eval"))
    _predict_progress_bar = property(lambda self: self._opened.get("predict"))

    def epoch_start(self, state: State, unit: Any, phase: str) -> None:
        progress, phase_state = progress_of(unit, phase), state_of(state, phase)
        if phase_state is not None:
            before = progress.num_steps_completed - progress.num_steps_completed_in_epoch
            ends = (
                known_length(phase_state.dataloader),
                phase_state.max_steps_per_epoch,
                phase_state.max_steps and phase_state.max_steps - before,
            )
            self._open(unit, phase, min((end for end in ends if end is not None), default=None))

    def dataloader_iter_creation_end(self, state: State, unit: Any, phase: str) -> None:
        phase_state = state_of(state, phase)
        left = phase_state.feed.total if isinstance(phase_state, PhaseState) and phase_state.feed is not None else None
        done = progress_of(unit, phase).num_steps_completed_in_epoch
        total = None if left is None else done + left
        if done:  # an epoch that is resumed has no start
            self._open(unit, phase, total)
        elif (bar := self._bars.get(phase)) is not None:
            bar.total = total

    def _open(self, unit: Any, phase: str, total: int | None) -> None:
        self._close(phase)
        if agree.is_rank0():
            progress = progress_of(unit, phase)
            self._bars[phase] = self._opened[phase] = self._tqdm(
                desc=f"{phase.capitalize()} Epoch {progress.num_epochs_completed}",
                total=total,
                initial=progress.num_steps_completed_in_epoch,
                file=self._file,
                **self._options,
            )

    def step_end(self, state: State, unit: Any, phase: str) -> None:
        bar = self._bars.get(phase)
        if bar is not None:
            done = progress_of(unit, phase).num_steps_completed_in_epoch
            if done % self._refresh_rate == 0:
                bar.update(done - bar.n)

    def epoch_end(self, state: State, unit: Any, phase: str) -> None:
        bar = self._bars.get(phase)
        if bar is not None:  # the progress has begun to count the next epoch
            bar.update(max(0, progress_of(unit, phase).num_steps_completed_in_prev_epoch - bar.n))
        self._close(phase)

    def end(self, state: State, unit: Any, phase: str) -> None:
        """Of an epoch that was cut short as well."""
        self._close(phase)

    def _close(self, phase: str) -> None:
        bar = self._bars.pop(phase, None)
        if bar is not None:
            bar.close()

    def on_exception(self, state: State, unit: Any, exc: BaseException) -> None:
        while self._bars:
            self._bars.popitem()[1].close()
