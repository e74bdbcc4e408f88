"""How far a phase has come."""

from __future__ import annotations

from typing import Any

__all__ = ["Progress"]


class Progress:
    """Counts epochs and steps of one phase. A step is one call of the unit's step, that is one micro-batch.

    Args:
        num_epochs_completed: epochs run to their end.
        num_steps_completed: steps over all epochs.
        num_steps_completed_in_epoch: steps since the present epoch began.
    """

    def __init__(
        self, num_epochs_completed: int = 0, num_steps_completed: int = 0, num_steps_completed_in_epoch: int = 0
    ) -> None:
        self.num_epochs_completed = num_epochs_completed
        self.num_steps_completed = num_steps_completed
        self.num_steps_completed_in_epoch = num_steps_completed_in_epoch
        self.num_steps_completed_in_prev_epoch = 0

    def increment_step(self) -> None:
        self.num_steps_completed += 1
        self.num_steps_completed_in_epoch += 1

    def increment_epoch(self) -> None:
        self.num_epochs_completed += 1
        self.num_steps_completed_in_prev_epoch = self.num_steps_completed_in_epoch
        self.num_steps_completed_in_epoch = 0

    def get_progress_string(self) -> str:
        return (
            f"completed epochs: {self.num_epochs_completed}, completed steps: {self.num_steps_completed}, "
            f"completed steps in current epoch: {self.num_steps_completed_in_epoch}."
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in vars(self):
            setattr(self, name, int(state_dict.get(name, 0)))
