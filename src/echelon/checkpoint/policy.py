"""When to save and what to keep, as values."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.contracts.errors import UsageError

__all__ = ["Every", "KeepLast"]


@dataclass(frozen=True)
class Every:
    """Save after every n-th step, epoch or evaluation. None is never.

    Args:
        train_steps, epochs, eval_epochs: n of each kind, at least 1.
    """

    train_steps: int | None = None
    epochs: int | None = None
    eval_epochs: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise UsageError(f"save every {value} {name.replace('_', ' ')}: at least 1, or None for never.")


@dataclass(frozen=True)
class KeepLast:
    """Keep the newest n checkpoints; None keeps all."""

    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise UsageError(f"keep the last {self.count} checkpoints: at least 1, or None for all.")
