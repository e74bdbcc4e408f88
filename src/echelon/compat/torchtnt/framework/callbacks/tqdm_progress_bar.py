"""torchtnt.framework.callbacks.tqdm_progress_bar: a tqdm bar for each epoch."""

from __future__ import annotations

from typing import Any, TextIO

from echelon.compat.torchtnt.framework.callbacks.by_phase import by_phase
from echelon.compat.torchtnt.utils.tqdm import tqdm
from echelon.data.prefetch import known_length
from echelon.loop.callback import Callback
from echelon.loop.callbacks.intervals import at_least
from echelon.loop.state import State
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
        at_least(1, refresh_rate=refresh_rate)
        self._refresh_rate = refresh_rate
        self._options: dict[str, Any] = {"file": file, **({} if mininterval is None else {"mininterval": mininterval})}
        self._bars: dict[str, Any] = {}  # the latest of each phase
        tqdm(disable=True)

    _train_progress_bar = property(lambda self: self._bars.get("train"))
    _eval_progress_bar = property(lambda self: self._bars.get("eval"))
    _predict_progress_bar = property(lambda self: self._bars.get("predict"))

    def epoch_start(self, state: State, unit: Any, phase: str) -> None:
        progress, here = getattr(unit, f"{phase}_progress"), getattr(state, f"{phase}_state")
        self.end(state, unit, phase)
        if agree.is_rank0() and here is not None:
            done = progress.num_steps_completed_in_epoch
            left = None if here.max_steps is None else here.max_steps - (progress.num_steps_completed - done)
            ends = [end for end in (known_length(here.dataloader), here.max_steps_per_epoch, left) if end is not None]
            name = f"{phase.capitalize()} Epoch {progress.num_epochs_completed}"
            self._bars[phase] = tqdm(desc=name, total=min(ends, default=None), initial=done, **self._options)

    def dataloader_iter_creation_end(self, state: State, unit: Any, phase: str) -> None:
        if getattr(unit, f"{phase}_progress").num_steps_completed_in_epoch:  # an epoch that is resumed has no start
            self.epoch_start(state, unit, phase)

    def step_end(self, state: State, unit: Any, phase: str) -> None:
        done = getattr(unit, f"{phase}_progress").num_steps_completed_in_epoch
        if (bar := self._bars.get(phase)) is not None and done % self._refresh_rate == 0:
            bar.update(done - bar.n)

    def epoch_end(self, state: State, unit: Any, phase: str) -> None:
        if (bar := self._bars.get(phase)) is not None:  # the progress has begun to count the next epoch
            bar.update(max(0, getattr(unit, f"{phase}_progress").num_steps_completed_in_prev_epoch - bar.n))
        self.end(state, unit, phase)

    def end(self, state: State, unit: Any, phase: str) -> None:
        """Of an epoch that was cut short as well."""
        if (bar := self._bars.get(phase)) is not None:
            bar.close()

    def on_exception(self, state: State, unit: Any, exc: BaseException) -> None:
        for bar in self._bars.values():
            bar.close()
