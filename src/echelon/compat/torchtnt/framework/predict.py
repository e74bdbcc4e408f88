"""torchtnt.framework.predict."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from echelon.compat.torchtnt.framework.runs import told
from echelon.loop import run

__all__ = ["predict"]

logger = logging.getLogger(__name__)


def predict(
    predict_unit: Any,
    predict_dataloader: Iterable[Any],
    *,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Any] | None = None,
    timer: Any = None,
) -> None:
    """As `echelon.predict`; the log has the limits, the end and the timer's table."""
    limits = {"max_steps_per_epoch": max_steps_per_epoch}
    with told(logger, "predict", predict_unit, ("predict",), timer, **limits):
        run.predict(predict_unit, predict_dataloader, callbacks=callbacks, timer=timer, **limits)
