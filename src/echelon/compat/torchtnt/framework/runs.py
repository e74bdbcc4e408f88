"""What TorchTNT's loops say in the log, around echelon's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from echelon.compat.torchtnt.framework.state import check_limits
from echelon.compat.torchtnt.utils.timer import get_timer_summary
from echelon.loop.progress import Progress

__all__ = ["told"]


@contextlib.contextmanager
def told(logger: logging.Logger, entry: str, unit: Any, phases: tuple[str, ...], timer: Any, **limits: Any) -> Iterator[None]:
    """Context of a run: INFO of its limits, of its end with the timer's table, or of the progress at an exception."""
    check_limits(**limits)
    said = ", ".join(f"{name}={value}" for name, value in limits.items())
    logger.info("Started %s with %s", entry, said)
    try:
        yield
    except Exception as error:
        found = {phase: getattr(unit, f"{phase}_progress", None) for phase in phases}
        texts = {phase: each.get_progress_string() for phase, each in found.items() if isinstance(each, Progress)}
        progress = " ".join(
            texts.values() if len(phases) == 1 else (f"{phase} progress: {each}" for phase, each in texts.items())
        )
        logger.info("Exception during %s after the following progress: %s:\n%s", entry, progress, error)
        raise
    logger.info("Finished %s", "evaluation" if entry == "evaluate" else entry)
    if timer is not None:
        logger.info(get_timer_summary(timer))
