"""How long steps take and wait for data, and what they get through. All on rank 0, from the durations that the loop keeps.

A step's time is logged at the end of the next one, and the last step's at the end of the phase, as TorchTNT does, whose programs
call these hooks by hand: a step's duration is known once its hooks have run.

A duration is the host's: on a GPU a step is measured until its work is queued, not until it is done, except where something
makes the host wait. Over an epoch the difference is nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from echelon.common.errors import UsageError
from echelon.compat.torchtnt.framework.callbacks.by_phase import by_phase, progress_of, state_of
from echelon.loop.callback import Callback
from echelon.loop.callbacks.intervals import at_least
from echelon.loop.state import PhaseState, State
from echelon.observe.loggers.logger import MetricLogger
from echelon.world import agree

__all__ = ["IterationTimeLogger", "ThroughputLogger", "TimeWaitForBatchLogger"]

_WAITS = "data_wait_time"


def _least(least: int, name: str, value: int) -> None:
    if value < least:
        raise UsageError(f"{name} must be at least {least}, got {value}")
    at_least(least, **{name: value})


@by_phase("step_end", "end")
class _EachStep(Callback):
    """Calls `log_step` on rank 0, where a step is to be logged."""

    may_stop = False

    def __init__(self, logger: Any, log_every_n_steps: int, warmup_steps: int) -> None:
        _least(1, "log_every_n_steps", log_every_n_steps)
        _least(0, "warmup_steps", warmup_steps)
        self._logger, self.log_every_n_steps, self.warmup_steps = logger, log_every_n_steps, warmup_steps

    def log_step(self, here: Any, phase: str, step: int, *, ended: bool) -> None:
        """
        Args:
            here: the phase's state.
            step: its number, from 1.
            ended: at the phase's end; else the step after it is under way.
        """

    def step_end(self, state: State, unit: Any, phase: str) -> None:
        self._log_if_due(state, phase, progress_of(unit, phase).num_steps_completed - 1, ended=False)

    def end(self, state: State, unit: Any, phase: str) -> None:
        self._log_if_due(state, phase, progress_of(unit, phase).num_steps_completed, ended=True)

    def _log_if_due(self, state: State, phase: str, step: int, *, ended: bool) -> None:
        if step > self.warmup_steps and step % self.log_every_n_steps == 0 and agree.is_rank0():
            self.log_step(state_of(state, phase), phase, step, ended=ended)

    def _log(self, name: str, value: float, step: int) -> None:
        """To a MetricLogger, or a SummaryWriter of TensorBoard."""
        log = self._logger.log if hasattr(self._logger, "log") else self._logger.add_scalar
        log(name, value, step)


def _durations(here: Any, series: str) -> list[float]:
    return list(here.iteration_timer.recorded_durations.get(series, ())) if here is not None else []


def _of_steps(here: Any, phase: str, *, ended: bool) -> list[float]:
    """Durations of the steps before the one under way, which the loop has noted already."""
    found = _durations(here, f"{phase}_iteration_time")
    in_loop = not ended and isinstance(here, PhaseState) and here.feed is not None
    return found[:-1] if in_loop else found


class IterationTimeLogger(_EachStep):
    """Logs how long steps take, in seconds, without waiting for data: "Train Iteration Time (seconds)" and so on.

    Args:
        logger: a MetricLogger, or TensorBoard's SummaryWriter.
        moving_avg_window: log the mean of so many latest steps.
        log_every_n_steps: of each phase.
        warmup_steps: leave out so many steps of each phase at first.
    """

    _NAMES = {  # noqa: RUF012
        "train": "Train Iteration Time (seconds)",
        "eval": "Eval Iteration Time (seconds)",
        "predict": "Prediction Iteration Time (seconds)",
        "test": "Test Iteration Time (seconds)",
    }

    def __init__(
        self, logger: MetricLogger | Any, *, moving_avg_window: int = 1, log_every_n_steps: int = 1, warmup_steps: int = 0
    ) -> None:
        _least(1, "moving_avg_window", moving_avg_window)
        super().__init__(logger, log_every_n_steps, warmup_steps)
        self.moving_avg_window = moving_avg_window

    def log_step(self, here: Any, phase: str, step: int, *, ended: bool) -> None:
        latest = _of_steps(here, phase, ended=ended)[-self.moving_avg_window :]
        if latest:
            self._log(self._NAMES[phase], sum(latest) / len(latest), step)


class TimeWaitForBatchLogger(_EachStep):
    """Logs how long steps wait for their batch, in seconds: "Time Wait For Batch (Train)" and so on; at the end of the step.

    Args:
        logger: a MetricLogger, or TensorBoard's SummaryWriter.
        log_every_n_steps, warmup_steps: as in IterationTimeLogger.
    """

    _NAMES = {  # noqa: RUF012
        "train": "Time Wait For Batch (Train)",
        "eval": "Time Wait For Batch (Eval)",
        "predict": "Time Wait For Batch (Predict)",
        "test": "Time Wait For Batch (Test)",
    }

    def __init__(self, logger: MetricLogger | Any, *, log_every_n_steps: int = 1, warmup_steps: int = 0) -> None:
        super().__init__(logger, log_every_n_steps, warmup_steps)

    def step_end(self, state: State, unit: Any, phase: str) -> None:
        self._log_if_due(state, phase, progress_of(unit, phase).num_steps_completed, ended=False)

    def end(self, state: State, unit: Any, phase: str) -> None: ...

    def log_step(self, here: Any, phase: str, step: int, *, ended: bool) -> None:
        if waits := _durations(here, _WAITS):
            self._log(self._NAMES[phase], waits[-1], step)


@by_phase("dataloader_iter_creation_start")
class ThroughputLogger(_EachStep):
    """Logs items per second of a step, its wait for data included, and of an epoch:
    "Train: <item> per second (step granularity)", "... (epoch granularity)".

    An epoch's rate counts the steps that this process ran of it, and all the time from the first of them to the end, an
    evaluation inside it included. A step's is by number of steps, an epoch's by number of epochs, each counted from 1.

    Args:
        logger: a MetricLogger, or TensorBoard's SummaryWriter.
        throughput_per_batch: {item: how many of it a batch has}, of one rank or of all, as you wish to read it.
        log_every_n_steps, warmup_steps: as in IterationTimeLogger; for the rate of a step.
    """

    _NAMES = {  # noqa: RUF012
        "train": "Train",
        "eval": "Eval",
        "predict": "Predict",
        "test": "Test",
    }

    def __init__(
        self,
        logger: MetricLogger | Any,
        throughput_per_batch: Mapping[str, int],
        *,
        log_every_n_steps: int = 1,
        warmup_steps: int = 0,
    ) -> None:
        if not throughput_per_batch:
            raise UsageError("throughput_per_batch cannot be empty: {'samples': 32}, say.")
        for item, number in throughput_per_batch.items():
            if number < 1:
                raise UsageError(f"throughput_per_batch item {item} must be at least 1, got {number}")
        super().__init__(logger, log_every_n_steps, warmup_steps)
        self._items = dict(throughput_per_batch)
        self._since: dict[str, float] = {}
        self._steps: Counter[str] = Counter()

    def log_step(self, here: Any, phase: str, step: int, *, ended: bool) -> None:
        times, waits = _of_steps(here, phase, ended=ended), _durations(here, _WAITS)
        wait = -1 if ended else -2  # the step under way has waited already
        if times and len(waits) >= -wait:
            self._rates(phase, "step", 1, times[-1] + waits[wait], step)

    def _begin(self, phase: str) -> None:
        self._since[phase] = time.perf_counter()
        self._steps[phase] = 0

    def on_train_epoch_start(self, state: State, unit: Any) -> None:
        self._begin("train")

    def on_eval_start(self, state: State, unit: Any) -> None:
        self._begin("eval")

    def on_predict_start(self, state: State, unit: Any) -> None:
        self._begin("predict")

    def on_test_start(self, state: State, unit: Any) -> None:
        self._begin("test")

    def dataloader_iter_creation_start(self, state: State, unit: Any, phase: str) -> None:
        if phase not in self._since:  # an epoch that is resumed in its middle has no start
            self._begin(phase)

    def step_end(self, state: State, unit: Any, phase: str) -> None:
        super().step_end(state, unit, phase)
        self._steps[phase] += 1

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        self._log_epoch(unit, "train")

    def end(self, state: State, unit: Any, phase: str) -> None:
        super().end(state, unit, phase)
        if phase != "train":
            self._log_epoch(unit, phase)

    def _log_epoch(self, unit: Any, phase: str) -> None:
        since, steps = self._since.pop(phase, None), self._steps[phase]
        if since is not None and agree.is_rank0():
            self._rates(phase, "epoch", steps, time.perf_counter() - since, progress_of(unit, phase).num_epochs_completed)

    def _rates(self, phase: str, granularity: str, steps: int, seconds: float, at: int) -> None:
        if steps and seconds > 0:
            for item, number in self._items.items():
                self._log(f"{self._NAMES[phase]}: {item} per second ({granularity} granularity)", number * steps / seconds, at)
