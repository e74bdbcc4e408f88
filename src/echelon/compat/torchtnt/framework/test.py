"""torchtnt.framework.test."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from echelon.compat.torchtnt.framework.runs import told
from echelon.loop import run

__all__ = ["test"]

logger = logging.getLogger(__name__)


def test(
    test_unit: Any,
    test_dataloader: Iterable[Any],
    *,
    max_steps_per_epoch: float | None = None,
    callbacks: list[Any] | None = None,
    timer: Any = None,
) -> None:
    """As `echelon.units.test`; the log has the limits, the end and the timer's table."""
    limits = {"max_steps_per_epoch": max_steps_per_epoch}
    with told(logger, "test", test_unit, ("test",), timer, **limits):
        run.test(test_unit, test_dataloader, callbacks=callbacks, timer=timer, **limits)


test.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it where it is imported
