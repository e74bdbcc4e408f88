"""The numbers in a file of records, by name: a million records are read in seconds, and held as numbers instead of objects.

A value that is not a number is left out by itself; the record's other values count. Of steps that a resumed run wrote again, the
last record counts, since it belongs to the state that continued.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from operator import lt
from typing import Any, overload

__all__ = ["Columns", "Line", "finite", "moment", "number"]

Point = tuple[float, float]

_BATCH = 10_000
_MOST_NAMES = 1000  # the file may be another user's
_PLAIN = {int, float}


class Line(Sequence[Point]):
    """Points (step, value) with increasing, finite steps; values may be nan or inf. Elements and slices are tuples and lists of
    them.

    Attributes:
        xs, ys: the steps and the values, of equal length.
    """

    def __init__(self, xs: Sequence[float] = (), ys: Sequence[float] = ()) -> None:
        self.xs, self.ys = xs, ys

    def __len__(self) -> int:
        return len(self.xs)

    @overload
    def __getitem__(self, at: int) -> Point: ...
    @overload
    def __getitem__(self, at: slice) -> list[Point]: ...
    def __getitem__(self, at: int | slice) -> Point | list[Point]:
        return list(zip(self.xs[at], self.ys[at], strict=True)) if isinstance(at, slice) else (self.xs[at], self.ys[at])

    def __iter__(self) -> Iterator[Point]:
        return zip(self.xs, self.ys, strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def finite(self) -> list[float]:
        """The values that are finite, in order."""
        return list(filter(math.isfinite, self.ys))


class Columns:
    """Collects records with a `step`, and returns their numbers by name.

    Attributes:
        dropped: whether there were more names than are kept.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[array[float], array[float]]] = {}
        self._lines: dict[str, Line] = {}
        self.dropped = False

    def add(self, records: Iterator[Mapping[str, Any]]) -> None:
        """Add records, in the order in which they were written."""
        while batch := list(islice(records, _BATCH)):
            self._add([record for record in batch if "step" in record])

    def _add(self, batch: list[Mapping[str, Any]]) -> None:
        steps = [record["step"] for record in batch]
        # The sum of numbers up to 1e300 is finite; min and max would miss a nan that is not the first.
        if not _is_plain(steps) or not math.isfinite(sum(steps)):
            numbers = [finite(step) for step in steps]
            batch = [r for r, step in zip(batch, numbers, strict=True) if step is not None]
            steps = [step for step in numbers if step is not None]
        for name in dict.fromkeys(name for names in {tuple(record) for record in batch} for name in names):
            if name == "step":
                continue
            if name not in self._by_name and len(self._by_name) >= _MOST_NAMES:
                self.dropped = True
                continue
            xs: Sequence[float] = steps
            ys: list[Any] = [record.get(name) for record in batch]
            if not _is_plain(ys):
                there = [(x, y) for x, value in zip(xs, ys, strict=True) if (y := number(value)) is not None]
                xs, ys = [x for x, _ in there], [y for _, y in there]
            if xs:
                known = self._by_name.setdefault(name, (array("d"), array("d")))
                known[0].extend(xs)
                known[1].extend(ys)

    def names(self) -> list[str]:
        """The names of all numbers, in the order in which they first occurred."""
        return list(self._by_name)

    def line(self, name: str) -> Line:
        """The points of a name; empty if no record has it."""
        if name not in self._lines:
            self._lines[name] = _increasing(*self._by_name.get(name, (array("d"), array("d"))))
        return self._lines[name]


def _is_plain(values: Sequence[Any]) -> bool:
    """Whether all values are plain numbers in range, which need no check one by one."""
    return not values or (set(map(type, values)) <= _PLAIN and max(values) <= 1e300 and min(values) >= -1e300)


def _increasing(xs: array[float], ys: array[float]) -> Line:
    if all(map(lt, xs, islice(xs, 1, None))):
        return Line(xs, ys)
    last = dict(zip(xs, ys, strict=True))
    order = list(last) if all(a < b for a, b in pairwise(last)) else sorted(last)
    return Line(array("d", order), array("d", map(last.__getitem__, order)))


def number(value: object) -> float | None:
    """A JSON number, or "nan", "inf", "-inf", as a float. Beyond 1e300 counts as infinite: differences must stay finite."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if abs(value) > 1e300:  # compared before the conversion: a Python int may be too large for a float
        return math.inf if value > 0 else -math.inf
    return float(value)


def finite(value: object) -> float | None:
    """As `number`, but None for nan and infinities."""
    checked = number(value)
    return checked if checked is not None and math.isfinite(checked) else None


def moment(value: object) -> float | None:
    """Seconds since the epoch, in the range of a clock; None for anything else."""
    seconds = number(value)
    return seconds if seconds is not None and 0 <= seconds < 1e12 else None
