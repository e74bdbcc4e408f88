"""torchtnt.utils.loggers.file."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from echelon.common.files import write_whole
from echelon.observe.loggers import file
from echelon.observe.loggers.logger import Scalar, hold

__all__ = ["FileLogger"]

logger = logging.getLogger(__name__)


class FileLogger(file.FileLogger):
    """As `echelon.observe.loggers.file.FileLogger`; once `steps_before_flushing` steps are held they are written at once, and not
    as the next step begins. What is logged for the latest of them afterwards makes its row anew.

    A program's own has a `flush` that writes `_log_buffer`, {step: {name: number}}, where it likes; what it leaves there stays.
    """

    _written: tuple[int, dict[str, Any]] | None = None  # the file's last row
    _kept = 0  # rows that a program's own flush has left

    def _begin(self) -> None:
        super()._begin()
        if self._writes:
            logger.info("Logging metrics to path: %s", self._path)

    @property
    def _log_buffer(self) -> dict[int, dict[str, Scalar]]:
        return self._rows

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        if not self._writes:
            return
        if self._written is not None and self._written[0] == step and not self._rows:
            self._rows[step] = self._written[1]
            self._written = None
            write_whole(self._path, self._without_last(self._path.read_text(encoding="utf-8")), 0o666)
        row = self._rows.setdefault(step, {"step": step})
        row.update({name: hold(data) for name, data in payload.items()}, time=time.time())
        if len(self._rows) - self._kept >= self._steps_before_flushing:
            self.flush()
            self._kept = len(self._rows)

    def flush(self) -> None:
        if self._rows:
            self._written = next(reversed(self._rows.items()))
        super().flush()

    def _check(self) -> None: ...

    def _append(self, rows: list[dict[str, float]]) -> None: ...

    def _without_last(self, text: str) -> str:
        """The file's text without its last row."""
        return text
