"""torchtnt.utils.progress: how far a phase has come, and how far it will go."""

from __future__ import annotations

import math
from collections.abc import Iterable

from echelon.compat.torchtnt.private import private_names
from echelon.loop import progress

__all__ = ["Progress", "estimated_steps_in_epoch", "estimated_steps_in_fit", "estimated_steps_in_loop"]


class Progress(progress.Progress):
    """As echelon's. What programs set under private names, having no other, they can set here."""

    locals().update(
        private_names(
            "num_epochs_completed", "num_steps_completed", "num_steps_completed_in_epoch", "num_steps_completed_in_prev_epoch"
        )
    )


def estimated_steps_in_epoch(
    dataloader: Iterable[object], *, num_steps_completed: int, max_steps: int | None, max_steps_per_epoch: int | None
) -> float:
    """Steps of the epoch that begins now; infinity if the loader has no length and nothing limits it.

    Args:
        num_steps_completed: of the whole run, so far.
    """
    left = math.inf if max_steps is None else max(0, max_steps - num_steps_completed)
    return min(_length(dataloader, max_steps_per_epoch), left)


def estimated_steps_in_loop(
    dataloader: Iterable[object], *, max_steps: int | None, max_steps_per_epoch: int | None, epochs: int | None
) -> int | None:
    """Steps of `train`, or of another loop; None if they cannot be known."""
    each = _length(dataloader, max_steps_per_epoch)
    every = 0 if not each else each * (math.inf if epochs is None else epochs)
    total = min(every, math.inf if max_steps is None else max_steps)
    return int(total) if math.isfinite(total) else None


def estimated_steps_in_fit(
    *,
    train_dataloader: Iterable[object],
    eval_dataloader: Iterable[object],
    epochs: int | None,
    max_steps: int | None,
    max_train_steps_per_epoch: int | None,
    max_eval_steps_per_epoch: int | None,
    eval_every_n_steps: int | None,
    eval_every_n_epochs: int | None,
) -> int | None:
    """Steps of `fit`, evaluations included; None if they cannot be known.

    `fit` evaluates once where both intervals end, and the last step that `max_steps` allows in any case.
    """
    steps = estimated_steps_in_loop(
        train_dataloader, max_steps=max_steps, max_steps_per_epoch=max_train_steps_per_epoch, epochs=epochs
    )
    if not steps or not (eval_every_n_steps or eval_every_n_epochs):
        return steps
    evaluations = steps // eval_every_n_steps if eval_every_n_steps else 0
    last_is_evaluated = bool(eval_every_n_steps) and steps % (eval_every_n_steps or 1) == 0
    if eval_every_n_epochs:
        each = _length(train_dataloader, max_train_steps_per_epoch)
        if not math.isfinite(each):
            return None
        between = int(each) * eval_every_n_epochs
        evaluations += steps // between
        if eval_every_n_steps:
            evaluations -= steps // math.lcm(between, eval_every_n_steps)
        last_is_evaluated = last_is_evaluated or steps % between == 0
    evaluations += steps == max_steps and not last_is_evaluated
    total = steps + evaluations * _length(eval_dataloader, max_eval_steps_per_epoch) if evaluations else steps
    return int(total) if math.isfinite(total) else None


def _length(dataloader: Iterable[object], limit: int | None) -> float:
    try:
        length: float = len(dataloader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        length = math.inf
    return length if limit is None else min(length, limit)
