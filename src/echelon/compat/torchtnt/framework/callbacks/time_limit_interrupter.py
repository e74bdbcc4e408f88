"""torchtnt.framework.callbacks.time_limit_interrupter: stop training in time."""

from __future__ import annotations

import logging
import re
import time
from datetime import datetime, timedelta
from typing import Any, Literal

from echelon.common.errors import UsageError
from echelon.loop.callback import Callback
from echelon.loop.callbacks.intervals import at_least
from echelon.loop.state import State
from echelon.world import agree

__all__ = ["TimeLimitInterrupter"]

logger = logging.getLogger(__name__)


class TimeLimitInterrupter(Callback):
    """Stops training on all ranks at the same step, when rank 0's clock says so. A run that is restored resumes from there.

    `echelon run --stop-after` needs no callback, and asks the job to be started again.

    Args:
        duration: of training in this process, from its start: "DD:HH:MM" or a timedelta.
        timestamp: the time of day, with its time zone. With both, whichever comes first.
        interval: look at the clock after each "step" or "epoch".
        interval_freq: after every n-th.
    """

    def __init__(
        self,
        duration: str | timedelta | None = None,
        timestamp: datetime | None = None,
        interval: Literal["epoch", "step"] = "epoch",
        interval_freq: int = 1,
    ) -> None:
        if duration in (None, "") and timestamp is None:
            raise UsageError("Invalid parameters. Expected at least one of duration or timestamp to be specified.")
        if timestamp is not None and timestamp.utcoffset() is None:
            raise UsageError(
                "Invalid timestamp. Expected a timezone aware datetime object, such as datetime(..., tzinfo=timezone.utc), got "
                f"{timestamp}."
            )
        if interval not in ("epoch", "step"):
            raise UsageError(f"interval {interval!r}: 'epoch' or 'step'.")
        at_least(1, interval_freq=interval_freq)
        self._duration_s = None if duration is None or duration == "" else _seconds(duration)
        self._timestamp, self._interval, self._every = timestamp, interval, interval_freq
        self._began = time.monotonic()
        self.may_stop = interval == "step"

    def on_train_start(self, state: State, unit: Any) -> None:
        self._began = time.monotonic()

    def on_train_step_end(self, state: State, unit: Any) -> None:
        if self._interval == "step" and unit.train_progress.num_steps_completed % self._every == 0:
            self._look(state)

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        if self._interval == "epoch" and unit.train_progress.num_epochs_completed % self._every == 0:
            self._look(state)

    def _look(self, state: State) -> None:
        if not agree.is_rank0():
            return  # the loop tells the others
        elapsed = time.monotonic() - self._began
        if self._duration_s is not None and elapsed >= self._duration_s:
            why = f"Training duration of {self._duration_s} seconds has exceeded. Time elapsed is {elapsed} seconds."
        elif self._timestamp is not None and datetime.now(self._timestamp.tzinfo) >= self._timestamp:
            why = f"Training timestamp limit {self._timestamp} has been reached."
        else:
            return
        logger.info("%s Stopping training.", why)
        state.stop()


def _seconds(duration: str | timedelta) -> float:
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    found = re.fullmatch(r"(\d{2}):([01]\d|2[0-3]):([0-5]\d)", duration)
    if found is None:
        raise UsageError(f"Invalid duration format '{duration}'. Expected format is DD:HH:MM (days, hours, minutes).")
    days, hours, minutes = (int(part) for part in found.groups())
    return timedelta(days=days, hours=hours, minutes=minutes).total_seconds()
