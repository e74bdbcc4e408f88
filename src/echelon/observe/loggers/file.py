"""Loggers to a file: one row per step, appended. What is written stays readable, however the process ends.

An existing file is continued, so a run that resumes after a kill keeps its rows. A row may then occur twice, for the steps
between the last checkpoint and the kill; the later row counts.
"""

from __future__ import annotations

import atexit
import csv
import io
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.common.arguments import flags, is_path
from echelon.common.errors import LoggerError, require
from echelon.common.files import write_whole
from echelon.common.numbers import whole
from echelon.contracts.rank import RankInfo
from echelon.observe.loggers.logger import Scalar, hold, rank, scalar_to_float

__all__ = ["CSVLogger", "FileLogger"]

logger = logging.getLogger(__name__)


class FileLogger(ABC):
    """Collects the numbers of a step into a row, and writes rows in batches. By default only rank 0 writes.

    Numbers on a GPU are read when rows are written, so that logging does not wait for the device at every step. Other processes
    must not write into the same file.

    Args:
        path: the file; its folder is created.
        steps_before_flushing: number of steps held in memory, which are lost if the process is killed.
        log_all_ranks: every rank writes, to a file of its own: "metrics.csv" becomes "metrics.rank3.csv".
    """

    def __init__(self, path: str | Path, steps_before_flushing: int = 100, log_all_ranks: bool = False) -> None:
        require(is_path(path), "path", "a file", path, kind=LoggerError)
        steps_before_flushing = whole("steps_before_flushing", steps_before_flushing, at_least=1, kind=LoggerError)
        flags(log_all_ranks=log_all_ranks, kind=LoggerError)
        self.log_all_ranks = log_all_ranks
        self._given, self._steps_before_flushing = Path(path), steps_before_flushing
        self._begin()

    def _begin(self) -> None:
        """Set up this process: whether it writes, and where."""
        this_rank = rank()
        self._writes = this_rank == 0 or self.log_all_ranks
        self._path = self._given
        if self.log_all_ranks and (this_rank > 0 or RankInfo().world_size > 1):
            self._path = self._path.with_suffix(f".rank{this_rank}{self._path.suffix}")
        self._rows: dict[int, dict[str, Scalar]] = {}
        if self._writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._check()
            atexit.register(self.close)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process, such as a rank that a Trainer started: held rows stay with the original."""
        self.__dict__.update(state)
        self._begin()

    @property
    def path(self) -> str:
        """The file of this rank."""
        return str(self._path)

    def log(self, name: str, data: Scalar, step: int) -> None:
        """Log one number. Numbers of the same step share a row until it is written."""
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Log several numbers of one step."""
        if not self._writes:
            return
        row = self._rows.get(step)
        if row is None:
            if len(self._rows) >= self._steps_before_flushing:
                self.flush()
            row = self._rows[step] = {"step": step}
        for name, data in payload.items():
            row[name] = hold(data)
        row["time"] = time.time()

    def flush(self) -> None:
        """Write all held rows."""
        rows, self._rows = self._rows, {}
        if rows:
            self._append([{k: v if k == "step" else scalar_to_float(v) for k, v in row.items()} for row in rows.values()])

    def close(self) -> None:
        """Write all held rows. Also done at an ordinary end of the process."""
        self.flush()
        atexit.unregister(self.close)

    @abstractmethod
    def _check(self) -> None:
        """Check an existing file; raise if it cannot be continued."""

    @abstractmethod
    def _append(self, rows: list[dict[str, float]]) -> None: ...


class CSVLogger(FileLogger):
    """Comma-separated values with one header line. A new name widens the table, for which the file is copied once."""

    def __init__(self, path: str | Path, steps_before_flushing: int = 100, log_all_ranks: bool = False) -> None:
        self._names: list[str] = []
        super().__init__(path, steps_before_flushing, log_all_ranks)

    def _check(self) -> None:
        if self._path.exists() and self._path.stat().st_size:
            with open(self._path, newline="", encoding="utf-8") as file:
                self._names = next(csv.reader(file))
            if "step" not in self._names:
                raise LoggerError(
                    f"{self._path} exists, and has no column 'step', so this logger did not write it. Choose another path."
                )

    def _append(self, rows: list[dict[str, float]]) -> None:
        new = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in self._names]
        text = io.StringIO(newline="")
        if new:
            self._names += new
            self._widen(text)
        csv.DictWriter(text, self._names, restval="").writerows(rows)
        if new:
            write_whole(self._path, text.getvalue(), 0o666)  # a reader sees the old file or the new one
        else:
            with open(self._path, "ab", buffering=0) as file:
                file.write(text.getvalue().encode())

    def _widen(self, into: io.StringIO) -> None:
        """Write the present table with the new columns."""
        table = csv.DictWriter(into, self._names, restval="", extrasaction="ignore")
        table.writeheader()
        if self._path.exists():
            with open(self._path, newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    table.writerow({k: v for k, v in row.items() if v is not None})
