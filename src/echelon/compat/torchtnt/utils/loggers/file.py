"""torchtnt.utils.loggers.file."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from echelon.contracts.files import write_whole
from echelon.observe.loggers import file
from echelon.observe.loggers.logger import Scalar

__all__ = ["FileLogger"]

logger = logging.getLogger(__name__)


class FileLogger(file.FileLogger):
    """As `echelon.observe.loggers.file.FileLogger`; once `steps_before_flushing` steps are held they are written at once, and not
    as the next step begins. What is logged for the latest of them afterwards makes its row anew."""

    _written: tuple[int, dict[str, Any]] | None = None  # the file's last row

    def _begin(self) -> None:
        super()._begin()
        if self._writes:
            logger.info("Logging metrics to path: %s", self._path)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        if self._written is not None and self._written[0] == step and not self._rows:
            self._rows[step] = self._written[1]
            self._written = None
            write_whole(self._path, self._without_last(self._path.read_text(encoding="utf-8")), 0o666)
        super().log_dict(payload, step)
        if len(self._rows) >= self._steps_before_flushing:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._written = next(reversed(self._rows.items()))
        super().flush()

    @abstractmethod
    def _without_last(self, text: str) -> str:
        """The file's text without its last row."""
