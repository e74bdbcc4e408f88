"""torchtnt.framework.train."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from echelon.compat.torchtnt.framework.runs import told, with_durations
from echelon.loop import run
from echelon.loop.state import PhaseState

__all__ = ["train"]


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
    """As `echelon.train`, in steps."""
    limits = {"max_epochs": max_epochs, "max_steps": max_steps, "max_steps_per_epoch": max_steps_per_epoch}
    with told("train", train_unit, ("train",), timer, **limits):
        run.run_training(train_unit, PhaseState(dataloader=train_dataloader, **limits), None, with_durations(callbacks), timer)
