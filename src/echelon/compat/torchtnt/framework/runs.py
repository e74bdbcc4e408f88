"""What all of TorchTNT's loops do around echelon's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from echelon.compat.torchtnt.framework.durations import Durations
from echelon.compat.torchtnt.framework.mocks import gives_batches
from echelon.compat.torchtnt.framework.state import check_limits
from echelon.compat.torchtnt.utils.timer import get_timer_summary
from echelon.loop.progress import Progress
from echelon.loop.validate import callbacks_of

__all__ = ["told", "with_durations"]


def with_durations(callbacks: Any) -> list[Any]:
    return [Durations(), *callbacks_of(callbacks)]


@contextlib.contextmanager
def told(entry: str, unit: Any, phases: tuple[str, ...], timer: Any, **limits: Any) -> Iterator[None]:
    """Context of a run: limits are checked, and INFO of the timer's table at its end, or of the progress at an exception."""
    check_limits(**limits)
    gives_batches(unit, phases)
    logger = logging.getLogger(f"echelon.compat.torchtnt.framework.{entry}")
    try:
        yield
    except Exception as error:
        by_phase = {phase: getattr(unit, f"{phase}_progress", None) for phase in phases}
        texts = {phase: each.get_progress_string() for phase, each in by_phase.items() if isinstance(each, Progress)}
        progress = " ".join(
            texts.values() if len(phases) == 1 else (f"{phase} progress: {each}" for phase, each in texts.items())
        )
        logger.info("Exception during %s after the following progress: %s:\n%s", entry, progress, error)
        raise
    if timer is not None:
        logger.info(get_timer_summary(timer))
