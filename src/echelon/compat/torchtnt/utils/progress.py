"""torchtnt.utils.progress: how far a phase has come."""

from __future__ import annotations

from echelon.compat.torchtnt.absent import absent
from echelon.compat.torchtnt.private import private_names
from echelon.loop import progress

__all__ = ["Progress"]


class Progress(progress.Progress):
    """As echelon's. What programs set under private names, having no other, they can set here."""

    locals().update(
        private_names(
            "num_epochs_completed", "num_steps_completed", "num_steps_completed_in_epoch", "num_steps_completed_in_prev_epoch"
        )
    )


__getattr__ = absent("utils.progress")
