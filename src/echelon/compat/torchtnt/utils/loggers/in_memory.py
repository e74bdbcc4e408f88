"""torchtnt.utils.loggers.in_memory: a logger that keeps everything in memory: for notebooks and tests."""

from __future__ import annotations

import time
from collections.abc import Mapping

from echelon.observe.loggers.logger import Scalar, scalar_to_float

__all__ = ["InMemoryLogger"]


class InMemoryLogger:
    """Keeps the numbers of this rank by step.

    Attributes:
        log_buffer: {step: {"step", "time", and each name: number}}, in the order in which steps came.
    """

    def __init__(self) -> None:
        self.log_buffer: dict[int, dict[str, float]] = {}

    def log(self, name: str, data: Scalar, step: int) -> None:
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        row = self.log_buffer.setdefault(step, {"step": step})
        row.update({name: scalar_to_float(data) for name, data in payload.items()}, time=time.time())

    def flush(self) -> None:
        """Show what is kept."""
        print(self.log_buffer)

    def close(self) -> None:
        """Forget everything."""
        self.log_buffer.clear()
