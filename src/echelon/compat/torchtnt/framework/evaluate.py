"""torchtnt.framework.evaluate."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from echelon.compat.torchtnt.framework.runs import told
from echelon.loop import run

__all__ = ["evaluate"]

logger = logging.getLogger(__name__)


def evaluate(
    eval_unit: Any,
    eval_dataloader: Iterable[Any],
    *,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Any] | None = None,
    timer: Any = None,
) -> None:
    """As `echelon.evaluate`; the log has the limits, the end and the timer's table."""
    limits = {"max_steps_per_epoch": max_steps_per_epoch}
    with told(logger, "evaluate", eval_unit, ("eval",), timer, **limits):
        run.evaluate(eval_unit, eval_dataloader, callbacks=callbacks, timer=timer, **limits)
