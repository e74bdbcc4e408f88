"""What TorchTNT's loops say in the log, around echelon's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from echelon.compat.torchtnt.framework.mocks import gives_batches
from echelon.compat.torchtnt.framework.state import check_limits
from echelon.compat.torchtnt.utils.timer import get_timer_summary
from echelon.loop.progress import Progress
from echelon.loop.state import EntryPoint

__all__ = ["tell_of_closed", "tell_of_epoch", "tell_of_phase", "told"]

_TRAINING = logging.getLogger("echelon.compat.torchtnt.framework.train")
_EVALUATION = logging.getLogger("echelon.compat.torchtnt.framework.evaluate")


def tell_of_phase(state: Any, phase: str) -> None:
    """At the start of what `fit` runs; other entries are told of by their own functions."""
    if state.entry_point is not EntryPoint.FIT:
        return
    if phase == "train":
        here = state.train_state
        _TRAINING.info(
            _STARTED,
            "train",
            _limits(max_epochs=here.max_epochs, max_steps=here.max_steps, max_steps_per_epoch=here.max_steps_per_epoch),
        )
    else:
        _EVALUATION.info(_STARTED, "evaluate", _limits(max_steps_per_epoch=state.eval_state.max_steps_per_epoch))


def tell_of_epoch(phase: str) -> None:
    """At the start of an epoch, or of what is left of one."""
    if phase == "train":
        _TRAINING.info("Started train epoch")


def tell_of_closed(unit: Any, state: Any, phase: str) -> None:
    """At the end of an epoch."""
    if phase == "train":
        progress = unit.train_progress
        _TRAINING.info("Ended train epoch")
        _TRAINING.info(
            "After train epoch, train progress: num_epochs_completed = %s, num_steps_completed = %s",
            *(progress.num_epochs_completed, progress.num_steps_completed),
        )
    elif phase == "eval" and state.entry_point is EntryPoint.FIT and unit.train_progress.num_steps_completed_in_epoch:
        _TRAINING.info("Finished evaluation. Resuming training epoch")


_STARTED = "Started %s with %s"


def _limits(**limits: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in limits.items())


@contextlib.contextmanager
def told(logger: logging.Logger, entry: str, unit: Any, phases: tuple[str, ...], timer: Any, **limits: Any) -> Iterator[None]:
    """Context of a run: INFO of its limits, of its end with the timer's table, or of the progress at an exception."""
    check_limits(**limits)
    gives_batches(unit, phases)
    said = _limits(**limits)
    logger.info(_STARTED, entry, said.replace(",", "") + " " if entry == "fit" else said)
    try:
        yield
    except Exception as error:
        found = {phase: getattr(unit, f"{phase}_progress", None) for phase in phases}
        texts = {phase: each.get_progress_string() for phase, each in found.items() if isinstance(each, Progress)}
        progress = " ".join(
            texts.values() if len(phases) == 1 else (f"{phase} progress: {each}" for phase, each in texts.items())
        )
        logger.info("Exception during %s after the following progress: %s:\n%s", entry, progress, error)
        raise
    logger.info("Finished %s", "evaluation" if entry == "evaluate" else entry)
    if timer is not None:
        logger.info(get_timer_summary(timer))
