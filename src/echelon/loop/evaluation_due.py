"""When an evaluation is due within `fit`."""

from __future__ import annotations

from echelon.loop.progress import Progress
from echelon.loop.state import PhaseState

__all__ = ["after_epoch", "after_step"]


def after_step(here: PhaseState, progress: Progress) -> bool:
    """Note an evaluation that belongs after this step, before a checkpoint is written at it; True if it comes at once.

    The last step of all that `max_steps` allows is evaluated, too: where it ends an epoch, once that is closed.
    """
    steps, done = here.evaluate_every_n_steps, progress.num_steps_completed
    at_once = steps is not None and done % steps == 0
    if at_once or (done == here.max_steps and (steps or here.evaluate_every_n_epochs)):
        progress.evaluation_due = True
    return at_once


def after_epoch(here: PhaseState, progress: Progress) -> None:
    """Note one that belongs after the epoch that was just counted, before a checkpoint is written at its end."""
    epochs, steps = here.evaluate_every_n_epochs, here.evaluate_every_n_steps
    just_evaluated = steps and progress.num_steps_completed % steps == 0
    if epochs and progress.num_epochs_completed % epochs == 0 and not just_evaluated:
        progress.evaluation_due = True
