"""Callbacks for learning rates, garbage collection and torch's profiler."""

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
    """The rate of each parameter group, as "<prefix>/<the group's name, or pg>:<its number among groups of this name>"."""
    seen: dict[str, int] = {}
    rates: dict[str, Any] = {}
    # With an optimizer partitioned over ranks, a group may have no parameters here.
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
        loggers: a logger, or a list of them.
        logging_interval: "epoch" logs at the start of each epoch, "step" before each step; both by number of completed steps.
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
    """Calls `begin` when the entry point starts, and `finish` when it ends: normally, by an exception or by Ctrl-C.

    An evaluation within `fit` is part of the run around it.
    """

    _running = False

    def begin(self, state: State, unit: Unit) -> None: ...

    def finish(self, state: State, unit: Unit) -> None:
        """Called once for each `begin`. No collective is allowed here: the run may end by an exception on one rank only."""

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
    """Collects garbage at the same steps on all ranks. With Python's own timing, ranks pause at different times and wait for one
    another.

    Collects young objects after every step, and all objects after every n-th. At the end of the run, however it ends, Python's
    collector is switched on again if it was on before.

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
    """Completed steps of the current phase; within `fit`, of training and evaluation together."""
    if state.entry_point is EntryPoint.FIT:
        return int(unit.train_progress.num_steps_completed + unit.eval_progress.num_steps_completed)
    return int(getattr(unit, f"{state.active_phase}_progress").num_steps_completed)


class PyTorchProfiler(WholeRun):
    """Starts a `torch.profiler.profile` with the run, calls its `step` after each step, and stops it at the end, also after an
    exception.

    Args:
        profiler: each rank has its own; give its trace handler a folder, in which each rank writes its own file.
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
