"""The rows that a part measured, and the file with all rows of a run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["LeftOut", "Notes", "Row", "as_json", "read_json", "read_rows", "write_whole"]

Status = Literal["ok", "failed", "left out"]


class LeftOut(Exception):
    """A part cannot be measured here: a package, a feature of the card or of the library is missing. The message says which."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        part: the part's name.
        name: what was measured or checked.
        value: a number or a word; None if there is none.
        unit: the value's unit.
        remark: how to read it, or what went wrong.
    """

    part: str
    name: str
    value: float | int | str | None = None
    unit: str = ""
    remark: str = ""
    status: Status = "ok"

    @property
    def measured(self) -> str:
        """Value and unit as text, after the status if it is not ok."""
        if isinstance(self.value, float):
            size = abs(self.value)
            digits = 0 if size >= 1000 else 1 if size >= 10 else 2 if size >= 1 else 3
            text = f"{self.value:,.{digits}f}" if size >= 0.001 or not size else f"{self.value:.1e}"
        else:
            text = "" if self.value is None else f"{self.value:,}" if type(self.value) is int else str(self.value)
        text = f"{text} {self.unit}".strip()
        return text if self.status == "ok" else f"{self.status.upper()} {text}".strip()


class Notes:
    """Writes a part's rows, each to disk at once, so that a part that dies keeps its rows."""

    def __init__(self, part: str, path: Path) -> None:
        self.part, self.path = part, path

    def __call__(self, name: str, value: Any = None, unit: str = "", remark: str = "", *, status: Status = "ok") -> None:
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)  # JSON has no nan
        row = Row(self.part, name, value, unit, remark, status)
        line = json.dumps(asdict(row), default=str).encode() + b"\n"
        with open(self.path, "ab", buffering=0) as file:  # one write, so that two processes of a part never mix their lines
            file.write(line)


def read_rows(path: Path) -> Iterator[Row]:
    """Whole lines only: a killed part may have left half a line."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    for line in lines:
        yield Row(**json.loads(line))


def write_whole(path: Path, text: str) -> None:
    """A reader finds the old text or the new one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def as_json(facts: dict[str, Any], rows: Iterable[Row]) -> str:
    return json.dumps({**facts, "results": [asdict(row) for row in rows]}, indent=1, default=str) + "\n"


def read_json(path: Path) -> tuple[dict[str, Any], list[Row]]:
    facts = json.loads(path.read_text())
    return facts, [Row(**row) for row in facts.pop("results")]
