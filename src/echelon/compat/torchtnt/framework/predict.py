"""torchtnt.framework.predict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from echelon.compat.torchtnt.framework.runs import told, with_durations
from echelon.loop import run

__all__ = ["predict"]


def predict(
    predict_unit: Any,
    predict_dataloader: Iterable[Any],
    *,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Any] | None = None,
    timer: Any = None,
) -> None:
    """As `echelon.predict`."""
    limits = {"max_steps_per_epoch": max_steps_per_epoch}
    with told("predict", predict_unit, ("predict",), timer, **limits):
        run.predict(predict_unit, predict_dataloader, callbacks=with_durations(callbacks), timer=timer, **limits)
