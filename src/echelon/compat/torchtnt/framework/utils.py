"""torchtnt.framework.utils."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.profiler import record_function

from echelon.loop.state import State

__all__ = ["get_timing_context"]


@contextlib.contextmanager
def get_timing_context(state: State, event_name: str) -> Iterator[tuple[Any, Any]]:
    """Context that the user's timer, if there is one, and torch's profiler record under `event_name`."""
    timer = state.timer.time(event_name) if state.timer is not None else contextlib.nullcontext()
    with timer as timed, record_function(event_name) as recorded:
        yield timed, recorded
