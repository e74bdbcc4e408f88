"""Progress: the counts of a phase's epochs, updates and steps."""

from __future__ import annotations

import itertools
import math
import reprlib
from contextlib import AbstractContextManager
from typing import Any

from echelon.checkpoint.strict import fits
from echelon.common.errors import CheckpointCorruptError
from echelon.parallel.patching import for_now

__all__ = ["Progress"]

_STEPS = ("num_steps_completed", "num_steps_completed_in_epoch", "num_steps_completed_in_prev_epoch")
_UPDATES = ("num_updates_completed", "num_updates_completed_in_epoch")
_COUNTS = ("num_epochs_completed", *_STEPS, *_UPDATES)
_FORM = {**dict.fromkeys(_COUNTS, int), "evaluation_due": bool, "skipped": [(int, int)], "early_stopping": {str: (int, float)}}


class Progress:
    """Counts epochs, updates and steps of one phase. An update is one step of the optimizer, on one or more micro-batches; a step
    is one call of the unit's step, on one micro-batch.

    Args:
        num_epochs_completed: epochs run to their end.
        num_steps_completed: steps over all epochs.
        num_steps_completed_in_epoch: steps since the current epoch began.
    Attributes:
        num_updates_completed: updates over all epochs, including skipped ones (by fp16's scaler, after a rollback), so update k
            has the samples of global batch k. Limits, checkpoints, evaluations and records count these.
        num_updates_completed_in_epoch: updates since the current epoch began.
        evaluation_due: within `fit`, an evaluation is due here and has not run to its end; a resumed run begins with it.
        skipped: ranges of updates, each as (first, one after the last), that are counted but not trained on.
        latest_loss: loss of the latest epoch, if the unit sets it and it is finite; kept for a resumed run.
        early_stopping: for each number by name, how often it has not improved, and its best value.
    """

    def __init__(
        self, num_epochs_completed: int = 0, num_steps_completed: int = 0, num_steps_completed_in_epoch: int = 0
    ) -> None:
        self.num_epochs_completed = num_epochs_completed
        self.num_steps_completed = num_steps_completed
        self.num_steps_completed_in_epoch = num_steps_completed_in_epoch
        self.num_steps_completed_in_prev_epoch = 0
        self.num_updates_completed = num_steps_completed
        self.num_updates_completed_in_epoch = num_steps_completed_in_epoch
        self.evaluation_due = False
        self.skipped: list[tuple[int, int]] = []
        self.latest_loss: float | None = None
        self.early_stopping: dict[str, list[float]] = {}

    def increment_step(self, *, updated: bool = False) -> None:
        """
        Args:
            updated: the step made an update.
        """
        self.num_steps_completed += 1
        self.num_steps_completed_in_epoch += 1
        if updated:
            self.num_updates_completed += 1
            self.num_updates_completed_in_epoch += 1

    def at_earlier_step(self, back: int) -> AbstractContextManager[None]:
        """Context in which the counts are those of `back` steps ago, for a micro-batch that the layout computes only now."""
        return for_now(self, **{name: getattr(self, name) - back for name in _STEPS[:2]})

    def increment_epoch(self) -> None:
        self.num_epochs_completed += 1
        self.num_steps_completed_in_prev_epoch = self.num_steps_completed_in_epoch
        self.num_steps_completed_in_epoch = self.num_updates_completed_in_epoch = 0

    def take_back(self, steps: int) -> None:
        """Uncount the latest steps, of this epoch, which will be taken again."""
        self.num_steps_completed -= steps
        self.num_steps_completed_in_epoch -= steps

    def abandon_epoch(self) -> None:
        """Uncount the steps of an epoch that was cut short and will start over."""
        self.num_steps_completed -= self.num_steps_completed_in_epoch
        self.num_steps_completed_in_epoch = 0

    @property
    def skips(self) -> bool:
        """Whether the next update is to be skipped."""
        return any(first <= self.num_updates_completed < stop for first, stop in self.skipped)

    def rescale(self, size: int, old: int) -> None:
        """Recount the steps, if an update now has `size` steps instead of `old`."""
        for name in _STEPS:
            setattr(self, name, getattr(self, name) * size // old)

    def get_progress_string(self) -> str:
        return (
            f"completed epochs: {self.num_epochs_completed}, completed steps: {self.num_steps_completed}, "
            f"completed steps in current epoch: {self.num_steps_completed_in_epoch}."
        )

    def state_dict(self) -> dict[str, Any]:
        state = dict(vars(self))
        state["skipped"] = [list(each) for each in self.skipped]
        state["early_stopping"] = {name: list(seen) for name, seen in self.early_stopping.items()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            CheckpointCorruptError: `state_dict` is not what `Progress.state_dict` gives.
        """
        state = {**Progress().state_dict(), **state_dict}
        for name in _UPDATES:  # another library's progress has no updates: each of its steps is one
            state[name] = state_dict.get(name, state[name.replace("updates", "steps")])
        loss, right = state["latest_loss"], fits(state, _FORM)
        numbers = [*(state[name] for name in _COUNTS), *itertools.chain(*state["skipped"])] if right else [-1]
        if min(numbers) < 0 or max(numbers) >= 2**63 or not (loss is None or (fits(loss, float) and math.isfinite(loss))):
            raise CheckpointCorruptError(f"a progress is not what echelon writes: {reprlib.repr(state_dict)}.")
        state["skipped"] = [(first, stop) for first, stop in state["skipped"]]
        vars(self).update({name: state[name] for name in vars(self)})
