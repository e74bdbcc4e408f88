"""How long steps take and wait for data, and what they get through. All on rank 0, from the durations that the loop keeps.

A duration is the host's: on a GPU a step is measured until its work is queued, not until it is done, except where something
makes the host wait. Over an epoch the difference is nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from echelon.contracts.errors import UsageError
from echelon.loop.callback import Callback
from echelon.loop.callbacks.steps import at_least, progress_of
from echelon.loop.state import ActivePhase, State
from echelon.observe.loggers.logger import MetricLogger
from echelon.world import agree

__all__ = ["IterationTimeLogger", "ThroughputLogger", "TimeWaitForBatchLogger"]

_WAITS = "data_wait_time"
_TIMES = {
    ActivePhase.TRAIN: "train_iteration_time",
    ActivePhase.EVALUATE: "eval_iteration_time",
    ActivePhase.PREDICT: "predict_iteration_time",
    ActivePhase.TEST: "test_iteration_time",
}


class _EachStep(Callback):
    """Calls `step_ended` after the steps that are to be logged, on rank 0, with the number of steps of this phase."""

    may_stop = False

    def __init__(self, logger: Any, log_every_n_steps: int, warmup_steps: int) -> None:
        at_least(1, log_every_n_steps=log_every_n_steps)
        at_least(0, warmup_steps=warmup_steps)
        self._logger, self._every, self._warmup = logger, log_every_n_steps, warmup_steps

    def step_ended(self, state: State, step: int) -> None: ...

    def on_train_step_end(self, state: State, unit: Any) -> None:
        step = progress_of(state, unit).num_steps_completed
        if step > self._warmup and step % self._every == 0 and agree.is_rank0():
            self.step_ended(state, step)

    on_eval_step_end = on_predict_step_end = on_test_step_end = on_train_step_end

    def _log(self, name: str, value: float, step: int) -> None:
        """To a MetricLogger, or a SummaryWriter of TensorBoard."""
        log = getattr(self._logger, "log", None) or self._logger.add_scalar
        log(name, value, step)


def _latest(state: State, series: str, count: int = 1) -> float:
    """The mean of the latest durations, in seconds."""
    here = state.active_phase_state()
    assert here is not None
    durations = here.iteration_timer.series(series)
    count = min(count, len(durations))
    return sum(islice(reversed(durations), count)) / count if count else 0.0


class IterationTimeLogger(_EachStep):
    """Logs how long steps take, in seconds, without waiting for data: "Train Iteration Time (seconds)" and so on.

    Args:
        logger: a MetricLogger, or TensorBoard's SummaryWriter.
        moving_avg_window: log the mean of so many latest steps.
        log_every_n_steps: of each phase.
        warmup_steps: leave out so many steps of each phase at first.
    """

    _NAMES = {  # noqa: RUF012
        ActivePhase.TRAIN: "Train Iteration Time (seconds)",
        ActivePhase.EVALUATE: "Eval Iteration Time (seconds)",
        ActivePhase.PREDICT: "Prediction Iteration Time (seconds)",
        ActivePhase.TEST: "Test Iteration Time (seconds)",
    }

    def __init__(
        self, logger: MetricLogger | Any, *, moving_avg_window: int = 1, log_every_n_steps: int = 1, warmup_steps: int = 0
    ) -> None:
        at_least(1, moving_avg_window=moving_avg_window)
        super().__init__(logger, log_every_n_steps, warmup_steps)
        self._window = moving_avg_window

    def step_ended(self, state: State, step: int) -> None:
        self._log(self._NAMES[state.active_phase], _latest(state, _TIMES[state.active_phase], self._window), step)


class TimeWaitForBatchLogger(_EachStep):
    """Logs how long steps wait for their batch, in seconds: "Time Wait For Batch (Train)" and so on.

    Args:
        logger: a MetricLogger, or TensorBoard's SummaryWriter.
        log_every_n_steps, warmup_steps: as in IterationTimeLogger.
    """

    _NAMES = {  # noqa: RUF012
        ActivePhase.TRAIN: "Time Wait For Batch (Train)",
        ActivePhase.EVALUATE: "Time Wait For Batch (Eval)",
        ActivePhase.PREDICT: "Time Wait For Batch (Predict)",
        ActivePhase.TEST: "Time Wait For Batch (Test)",
    }

    def __init__(self, logger: MetricLogger | Any, *, log_every_n_steps: int = 1, warmup_steps: int = 0) -> None:
        super().__init__(logger, log_every_n_steps, warmup_steps)

    def step_ended(self, state: State, step: int) -> None:
        self._log(self._NAMES[state.active_phase], _latest(state, _WAITS), step)


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
        ActivePhase.TRAIN: "Train",
        ActivePhase.EVALUATE: "Eval",
        ActivePhase.PREDICT: "Predict",
        ActivePhase.TEST: "Test",
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
        at_least(1, **{f"throughput_per_batch[{item!r}]": number for item, number in throughput_per_batch.items()})
        super().__init__(logger, log_every_n_steps, warmup_steps)
        self._items = dict(throughput_per_batch)
        self._epochs: dict[ActivePhase, tuple[float, int]] = {}  # since when, and how many steps were done before

    def step_ended(self, state: State, step: int) -> None:
        self._rates(state, "step", 1, _latest(state, _TIMES[state.active_phase]) + _latest(state, _WAITS), step)

    def on_train_dataloader_iter_creation_start(self, state: State, unit: Any) -> None:
        # Not at the start of an epoch, which an epoch that is resumed in its middle does not have.
        self._epochs[state.active_phase] = time.perf_counter(), progress_of(state, unit).num_steps_completed

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        progress, began = progress_of(state, unit), self._epochs.pop(state.active_phase, None)
        if began is not None and agree.is_rank0():
            since, before = began
            steps = progress.num_steps_completed - before
            self._rates(state, "epoch", steps, time.perf_counter() - since, progress.num_epochs_completed)

    on_eval_dataloader_iter_creation_start = on_train_dataloader_iter_creation_start
    on_predict_dataloader_iter_creation_start = on_train_dataloader_iter_creation_start
    on_test_dataloader_iter_creation_start = on_train_dataloader_iter_creation_start
    on_eval_epoch_end = on_predict_epoch_end = on_test_epoch_end = on_train_epoch_end

    def _rates(self, state: State, granularity: str, steps: int, seconds: float, at: int) -> None:
        if steps and seconds > 0:
            phase = self._NAMES[state.active_phase]
            for item, number in self._items.items():
                self._log(f"{phase}: {item} per second ({granularity} granularity)", number * steps / seconds, at)
