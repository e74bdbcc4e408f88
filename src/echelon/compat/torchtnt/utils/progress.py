"""torchtnt.utils.progress: how far a phase has come."""

from __future__ import annotations

from echelon.compat.torchtnt.absent import absent
from echelon.loop import progress

__all__ = ["Progress", "private_names"]


def private_names(*names: str) -> dict[str, property]:
    """Properties for a class's body: each attribute under its name with an underscore as well, to read and to set."""

    def of(name: str) -> property:
        return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))

    return {f"_{name}": of(name) for name in names}


class Progress(progress.Progress):
    """As echelon's. What programs set under private names, having no other, they can set here."""

    locals().update(
        private_names(
            "num_epochs_completed", "num_steps_completed", "num_steps_completed_in_epoch", "num_steps_completed_in_prev_epoch"
        )
    )


__getattr__ = absent("utils.progress")
