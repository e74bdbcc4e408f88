"""torchtnt.framework.evaluate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from echelon.compat.torchtnt.framework.runs import told, with_durations
from echelon.loop import run

__all__ = ["evaluate"]


def evaluate(
    eval_unit: Any,
    eval_dataloader: Iterable[Any],
    *,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Any] | None = None,
    timer: Any = None,
) -> None:
    """As `echelon.evaluate`."""
    limits = {"max_steps_per_epoch": max_steps_per_epoch}
    with told("evaluate", eval_unit, ("eval",), timer, **limits):
        run.evaluate(eval_unit, eval_dataloader, callbacks=with_durations(callbacks), timer=timer, **limits)
