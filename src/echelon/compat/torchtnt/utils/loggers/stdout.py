"""torchtnt.utils.loggers.stdout: a logger to the terminal."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from echelon.common.errors import require
from echelon.observe.loggers.logger import Scalar, rank, scalar_to_float

__all__ = ["StdoutLogger"]

logger = logging.getLogger(__name__)


class StdoutLogger:
    """Rank 0 prints "[Step 3] loss=0.1234 accuracy=0.9000": a line a step, which it begins, however many calls give its numbers.

    Args:
        precision: digits after the point.
    """

    def __init__(self, precision: int = 4) -> None:
        require(precision >= 0, "precision", "at least 0 digits", precision)
        self._precision = precision
        self._step: int | None = None
        logger.info("Logging metrics to stdout")

    def log(self, name: str, data: Scalar, step: int) -> None:
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        if rank() != 0:
            return
        numbers = "".join(f" {name}={scalar_to_float(data):.{self._precision}f}" for name, data in payload.items())
        begin = f"\n[Step {step}]" if step != self._step else ""
        self._step = step
        print(begin + numbers, end="", flush=True)  # at once: beside other programs' lines it would be cut in two

    def close(self) -> None:
        """End the line, and leave one empty."""
        if rank() == 0:
            print("\n", flush=True)
