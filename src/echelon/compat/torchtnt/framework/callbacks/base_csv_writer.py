"""torchtnt.framework.callbacks.base_csv_writer: predictions as a table."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from echelon.loop.callback import Callback
from echelon.loop.state import State, step_under_way
from echelon.world.init import World

__all__ = ["BaseCSVWriter"]


class BaseCSVWriter(Callback, ABC):
    """Writes the rows that `get_step_output_rows` makes of each prediction step's output.

    With several ranks each writes a file of its own, "predictions.rank1.csv" beside "predictions.rank0.csv": one file would have
    torn lines, and on some storage lose them. Rows are appended after each step; a file that is empty gets the header first.

    Args:
        header_row: names of the columns.
        dir_path: the folder, which is made.
        delimiter: between columns.
        filename: of the file.
    """

    def __init__(
        self, header_row: Sequence[str], dir_path: str | Path, delimiter: str = "\t", filename: str = "predictions.csv"
    ) -> None:
        self.header_row, self.dir_path, self.delimiter, self.filename = list(header_row), dir_path, delimiter, filename
        self._file: IO[str] | None = None
        self._table: Any = None

    @abstractmethod
    def get_step_output_rows(self, state: State, unit: Any, step_output: Any) -> Sequence[Any] | Sequence[Sequence[Any]]:
        """One row, or a list of rows."""

    @property
    def path(self) -> Path:
        """The file of this rank."""
        world, path = World.current(torch.device("cpu")), Path(self.dir_path) / self.filename
        return path if world.size == 1 else path.with_suffix(f".rank{world.rank}{path.suffix}")

    @property
    def output_path(self) -> str:
        """As `path`."""
        return str(self.path)

    def on_predict_start(self, state: State, unit: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a", newline="", encoding="utf-8")
        self._table = csv.writer(self._file, delimiter=self.delimiter)
        if self._file.tell() == 0:
            self._table.writerow(self.header_row)

    def on_predict_step_end(self, state: State, unit: Any) -> None:
        here = state.predict_state
        assert here is not None
        if step_under_way(here).is_padding:
            return  # another rank writes this sample
        if self._file is None:
            self.on_predict_start(state, unit)
        assert self._file is not None
        rows = self.get_step_output_rows(state, unit, here.step_output)
        if rows and isinstance(rows[0], (list, tuple)):
            self._table.writerows(rows)
        elif rows:
            self._table.writerow(rows)
        self._file.flush()

    def on_predict_end(self, state: State, unit: Any) -> None:
        if self._file is not None:
            self._file.close()
            self._file = self._table = None

    def on_exception(self, state: State, unit: Any, exc: BaseException) -> None:
        self.on_predict_end(state, unit)
