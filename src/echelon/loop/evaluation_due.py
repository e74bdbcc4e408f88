"""When an evaluation is due within `fit`."""

from __future__ import annotations

from echelon.loop.progress import Progress
from echelon.loop.state import EvaluateEvery, PhaseState

__all__ = ["after_epoch", "after_step"]


def after_step(here: PhaseState, progress: Progress, *, updated: bool) -> bool:
    """Note an evaluation that belongs after this step, before a checkpoint is written at it; True if it comes at once.

    The last of all that `max_updates` or `max_steps` allows is evaluated, too: where it ends an epoch, once that is closed.

    Args:
        updated: the step made an update.
    """
    at_once = _is_multiple(here, progress, updated=updated)
    if at_once or ((updated or here.max_steps is not None) and here.has_all(progress) and here.evaluations != EvaluateEvery()):
        progress.evaluation_due = True
    return at_once


def _is_multiple(here: PhaseState, progress: Progress, *, updated: bool) -> bool:
    every = here.evaluations
    by_updates = updated and every.updates is not None and progress.num_updates_completed % every.updates == 0
    return by_updates or (every.steps is not None and progress.num_steps_completed % every.steps == 0)


def after_epoch(here: PhaseState, progress: Progress) -> None:
    """Note one that belongs after the epoch that was just counted, before a checkpoint is written at its end."""
    epochs, done = here.evaluate_every_n_epochs, progress.num_epochs_completed
    is_due = (epochs and done % epochs == 0) or (here.evaluations.at_end and done == here.max_epochs)
    if is_due and not _is_multiple(here, progress, updated=True):
        progress.evaluation_due = True
