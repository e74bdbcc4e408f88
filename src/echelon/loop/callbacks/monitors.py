"""Learning rates, garbage collection and torch's profiler along a run."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, Literal

from torch.optim import Optimizer

from echelon.common.arguments import several
from echelon.common.errors import CallbackError, require
from echelon.common.numbers import whole
from echelon.loop.callback import Callback
from echelon.loop.state import EntryPoint, State
from echelon.loop.unit import Unit
from echelon.observe.loggers.logger import MetricLogger
from echelon.parallel.state.partition import parameter_groups

__all__ = ["GarbageCollector", "LearningRateMonitor", "PyTorchProfiler", "learning_rates"]


def learning_rates(optimizer: Optimizer, prefix: str) -> dict[str, Any]:
    """The rate of each parameter group, as "<prefix>/<the group's name, or pg>:<its number among those of this name>"."""
    seen: dict[str, int] = {}
    rates: dict[str, Any] = {}
    # A group's parameters may all be another rank's.
    for group, parameters in zip(optimizer.param_groups, parameter_groups(optimizer), strict=True):
        if parameters and group.get("lr") is not None:
            name = str(group.get("name", "pg"))
            rates[f"{prefix}/{name}:{seen.setdefault(name, 0)}"] = group["lr"]
            seen[name] += 1
    return rates


class LearningRateMonitor(Callback):
    """Logs the learning rates of the unit's optimizers, and of its schedulers' optimizers, as
    "optimizers/<attribute>/<group>:<number>" and "lr_schedulers/<attribute>/<group>:<number>".

    Args:
        loggers: one or several.
        logging_interval: "epoch" logs as epochs start, "step" before each step; by number of completed steps in both cases.
    """

    may_stop = False

    def __init__(
        self, loggers: MetricLogger | Sequence[MetricLogger], *, logging_interval: Literal["epoch", "step"] = "epoch"
    ) -> None:
        if logging_interval not in ("epoch", "step"):
            raise CallbackError(
                f"Invalid value '{logging_interval}' for argument logging_interval. Accepted values are ('epoch', 'step')."
            )
        given = [loggers] if _can_log(loggers) else loggers
        self._loggers = several("loggers", given, "a logger or a list of loggers", _can_log, kind=CallbackError)
        self.logging_interval = logging_interval

    def on_train_epoch_start(self, state: State, unit: Any) -> None:
        if self.logging_interval == "epoch":
            self._log(unit)

    def on_train_step_start(self, state: State, unit: Any) -> None:
        if self.logging_interval == "step":
            self._log(unit)

    def _log(self, unit: Any) -> None:
        rates: dict[str, Any] = {}
        for name, optimizer in unit.tracked_optimizers().items():
            rates |= learning_rates(optimizer, f"optimizers/{name}")
        for name, scheduler in unit.tracked_lr_schedulers().items():
            rates |= learning_rates(scheduler.optimizer, f"lr_schedulers/{name}")
        for logger in self._loggers:
            logger.log_dict(rates, unit.train_progress.num_steps_completed)


def _can_log(logger: Any) -> bool:
    return callable(getattr(logger, "log_dict", None))


class WholeRun(Callback):
    """Calls `begin` as the entry point starts, and `finish` as it ends: by its end, an exception or a Ctrl-C.

    An evaluation within `fit` is part of the run around it.
    """

    _running = False

    def begin(self, state: State, unit: Unit) -> None: ...

    def finish(self, state: State, unit: Unit) -> None:
        """Called once for each `begin`. No collective here: another rank's run may end by an exception that this one has not."""

    def on_train_start(self, state: State, unit: Any) -> None:
        self._running = True
        self.begin(state, unit)

    def on_train_end(self, state: State, unit: Any) -> None:
        if self._running:
            self._running = False
            self.finish(state, unit)

    on_predict_start = on_test_start = on_train_start
    on_predict_end = on_test_end = on_train_end

    def on_eval_start(self, state: State, unit: Any) -> None:
        if state.entry_point is not EntryPoint.FIT:
            self.on_train_start(state, unit)

    def on_eval_end(self, state: State, unit: Any) -> None:
        if state.entry_point is not EntryPoint.FIT:
            self.on_train_end(state, unit)

    def on_exception(self, state: State, unit: Unit, exc: BaseException) -> None:
        self.on_train_end(state, unit)


class GarbageCollector(WholeRun):
    """Collects garbage at the same steps on all ranks, instead of whenever each has made enough: ranks that pause at different
    times wait for one another.

    Young objects after every step, all objects every n-th. The collector is as it was before when the run ends, however it ends.

    Args:
        step_interval: n; within `fit`, steps of training and evaluation are counted together.
    """

    may_stop = False

    def __init__(self, step_interval: int) -> None:
        self._interval = whole("step_interval", step_interval, at_least=1, kind=CallbackError)
        self._was_on = True

    def begin(self, state: State, unit: Unit) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def finish(self, state: State, unit: Unit) -> None:
        if self._was_on:
            gc.enable()

    def on_train_step_end(self, state: State, unit: Any) -> None:
        gc.collect(2 if _steps_so_far(state, unit) % self._interval == 0 else 1)

    on_eval_step_end = on_predict_step_end = on_test_step_end = on_train_step_end


def _steps_so_far(state: State, unit: Any) -> int:
    """Steps of the phase that runs now; within `fit`, of training and evaluation together."""
    if state.entry_point is EntryPoint.FIT:
        return int(unit.train_progress.num_steps_completed + unit.eval_progress.num_steps_completed)
    return int(getattr(unit, f"{state.active_phase}_progress").num_steps_completed)


class PyTorchProfiler(WholeRun):
    """Starts a `torch.profiler.profile` with the run, tells it of each step, and stops it at the end, an exception included.

    Args:
        profiler: every rank's own; give its trace handler a folder, in which ranks write files of their own.
    """

    may_stop = False

    def __init__(self, profiler: Any) -> None:
        can_step = callable(getattr(profiler, "step", None)) and not isinstance(profiler, type)
        require(can_step, "profiler", "a torch.profiler.profile(...)", profiler, kind=CallbackError)
        self.profiler = profiler

    def begin(self, state: State, unit: Unit) -> None:
        self.profiler.start()

    def finish(self, state: State, unit: Unit) -> None:
        self.profiler.stop()

    def on_train_step_end(self, state: State, unit: Any) -> None:
        self.profiler.step()

    on_eval_step_end = on_predict_step_end = on_test_step_end = on_train_step_end
