"""TorchTNT's loops: echelon's, counted in steps. torchtnt.framework.train, evaluate, predict and fit are this module."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from echelon.common.errors import UnitError
from echelon.compat.torchtnt.framework.mocks import gives_batches
from echelon.compat.torchtnt.framework.state import check_limits
from echelon.compat.torchtnt.utils.timer import Timer, get_timer_summary
from echelon.loop import run
from echelon.loop.callback import Callback
from echelon.loop.progress import Progress
from echelon.loop.state import PhaseState, State
from echelon.loop.unit import EvalUnit, TrainUnit
from echelon.loop.validate import callbacks_of

__all__ = ["evaluate", "fit", "predict", "train"]


class _Series(deque[float]):
    """The latest durations, oldest first. Slices are lists."""

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at] if isinstance(at, slice) else super().__getitem__(at)


class _Durations(Callback):
    """Records how long the latest steps and waits of a phase took, in its state's `iteration_timer`. It is a run's first
    callback, so that others find the timer."""

    may_stop = False
    _since = 0.0

    def on_train_start(self, state: State, unit: Any) -> None:
        here: Any = state.active_phase_state()
        if getattr(here, "iteration_timer", None) is None:
            here.iteration_timer = Timer()  # bounded, so that a long run does not grow
            here.iteration_timer.recorded_durations = defaultdict(partial(_Series, maxlen=5000))

    def on_train_get_next_batch_start(self, state: State, unit: Any) -> None:
        self._since = time.perf_counter()

    def on_train_step_start(self, state: State, unit: Any) -> None:
        self._note(state, "data_wait_time")

    def on_train_step_end(self, state: State, unit: Any) -> None:
        self._note(state, f"{state.active_phase}_iteration_time")

    on_eval_start = on_predict_start = on_train_start
    on_eval_get_next_batch_start = on_predict_get_next_batch_start = on_train_get_next_batch_start
    on_eval_step_start = on_predict_step_start = on_train_step_start
    on_eval_step_end = on_predict_step_end = on_train_step_end

    def _note(self, state: State, name: str) -> None:
        now = time.perf_counter()
        here: Any = state.active_phase_state()
        here.iteration_timer.recorded_durations[name].append(now - self._since)
        self._since = now


def with_durations(callbacks: Any) -> list[Any]:
    return [_Durations(), *callbacks_of(callbacks)]


@contextlib.contextmanager
def told(entry: str, unit: Any, phases: tuple[str, ...], timer: Any, **limits: Any) -> Iterator[None]:
    """Context of a run: checks limits; logs the timer's table at the end, or the progress at an exception."""
    check_limits(**limits)
    gives_batches(unit, phases)
    logger = logging.getLogger(f"echelon.compat.torchtnt.framework.{entry}")
    try:
        yield
    except Exception as error:
        by_phase = {phase: getattr(unit, f"{phase}_progress", None) for phase in phases}
        texts = {phase: each.get_progress_string() for phase, each in by_phase.items() if isinstance(each, Progress)}
        progress = " ".join(
            texts.values() if len(phases) == 1 else (f"{phase} progress: {each}" for phase, each in texts.items())
        )
        logger.info("Exception during %s after the following progress: %s:\n%s", entry, progress, error)
        raise
    if timer is not None:
        logger.info(get_timer_summary(timer))


def train(
    train_unit: Any,
    train_dataloader: Iterable[Any],
    *,
    max_epochs: float | None = None,
    max_steps: float | None = None,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Any] | None = None,
    timer: Any = None,
) -> None:
    """As `echelon.train`, counted in steps."""
    limits = {"max_epochs": max_epochs, "max_steps": max_steps, "max_steps_per_epoch": max_steps_per_epoch}
    with told("train", train_unit, ("train",), timer, **limits):
        run.run_training(train_unit, PhaseState(dataloader=train_dataloader, **limits), None, with_durations(callbacks), timer)


def evaluate(
    eval_unit: Any,
    eval_dataloader: Iterable[Any],
    *,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Any] | None = None,
    timer: Any = None,
) -> None:
    """As `echelon.evaluate`."""
    limits = {"max_steps_per_epoch": max_steps_per_epoch}
    with told("evaluate", eval_unit, ("eval",), timer, **limits):
        run.evaluate(eval_unit, eval_dataloader, callbacks=with_durations(callbacks), timer=timer, **limits)


def predict(
    predict_unit: Any,
    predict_dataloader: Iterable[Any],
    *,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Any] | None = None,
    timer: Any = None,
) -> None:
    """As `echelon.predict`."""
    limits = {"max_steps_per_epoch": max_steps_per_epoch}
    with told("predict", predict_unit, ("predict",), timer, **limits):
        run.predict(predict_unit, predict_dataloader, callbacks=with_durations(callbacks), timer=timer, **limits)


def fit(
    unit: Any,
    train_dataloader: Iterable[Any],
    eval_dataloader: Iterable[Any],
    *,
    max_epochs: float | None = None,
    max_steps: float | None = None,
    max_train_steps_per_epoch: float | None = None,
    max_eval_steps_per_epoch: float | None = None,
    evaluate_every_n_steps: float | None = None,
    evaluate_every_n_epochs: float | None = 1,
    callbacks: list[Any] | None = None,
    timer: Any = None,
) -> None:
    """As `echelon.fit`, counted in steps.

    Args:
        evaluate_every_n_steps, evaluate_every_n_epochs: 0 never evaluates, like None.
    Raises:
        UnitError: the unit is not both a TrainUnit and an EvalUnit.
    """
    for kind in (TrainUnit, EvalUnit):
        if not isinstance(unit, kind):
            has = f"{kind.__name__.removesuffix('Unit').lower()}_step"
            raise UnitError(
                f"Expected unit to implement {kind.__name__} interface. The unit of fit() must inherit from {kind.__name__}, "
                f"which has {has}, got {type(unit).__name__}."
            )
    limits = {
        "max_epochs": max_epochs,
        "max_steps": max_steps,
        "max_train_steps_per_epoch": max_train_steps_per_epoch,
        "max_eval_steps_per_epoch": max_eval_steps_per_epoch,
        "evaluate_every_n_steps": evaluate_every_n_steps,
        "evaluate_every_n_epochs": evaluate_every_n_epochs,
    }
    with told("fit", unit, ("train", "eval"), timer, **limits):
        train_state = PhaseState(
            dataloader=train_dataloader,
            max_epochs=max_epochs,
            max_steps=max_steps,
            max_steps_per_epoch=max_train_steps_per_epoch,
            evaluate_every_n_steps=evaluate_every_n_steps or None,
            evaluate_every_n_epochs=evaluate_every_n_epochs or None,
        )
        eval_state = PhaseState(dataloader=eval_dataloader, max_steps_per_epoch=max_eval_steps_per_epoch)
        run.run_training(unit, train_state, eval_state, with_durations(callbacks), timer)
