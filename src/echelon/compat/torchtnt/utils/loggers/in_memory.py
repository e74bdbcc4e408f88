"""torchtnt.utils.loggers.in_memory: a logger that keeps everything in memory: for notebooks and tests."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping

from echelon.observe.loggers.logger import Scalar, scalar_to_float

__all__ = ["InMemoryLogger"]

logger = logging.getLogger(__name__)


class InMemoryLogger:
    """Keeps the numbers of this rank by step.

    Attributes:
        log_buffer: {step: {each name: number, "step", "time"}}, in the order in which steps came.
    """

    def __init__(self) -> None:
        self.log_buffer: OrderedDict[int, dict[str, float]] = OrderedDict()
        logger.info("Logging metrics in-memory")

    def log(self, name: str, data: Scalar, step: int) -> None:
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        for name, data in payload.items():
            self.log_buffer.setdefault(step, {}).update({name: scalar_to_float(data), "step": step, "time": time.time()})

    def flush(self) -> None:
        """Show what is kept."""
        print(self.log_buffer)

    def close(self) -> None:
        """Forget everything."""
        self.log_buffer.clear()
