"""Fewer points that show the same: the extremes of every stretch, its mean, and a trend over the means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from echelon.observe.columns import Line

__all__ = ["calm", "means", "smooth", "thin", "typical"]

Point = tuple[float, float]

_POINTS = 1000  # drawn per line: more than a screen has columns
_SAMPLE = 2000


def _line(points: Sequence[Point]) -> Line:
    return points if isinstance(points, Line) else Line([x for x, _ in points], [v for _, v in points])


def thin(points: Sequence[Point], limit: int = _POINTS) -> list[Point]:
    """At most about `limit` of the points: of each bucket the lowest, the highest and one that is not finite.

    A spike or a gap of one record stays visible, and every point is a record as it was written. First and last always stay.
    """
    if len(points) <= limit:
        return list(points)
    line = _line(points)
    keep = {0, len(line) - 1}
    for bucket in _buckets(len(line), limit // 2):
        values = line.ys[bucket.start : bucket.stop]
        # The sum of finite values may overflow, and then the slow way is taken for nothing.
        finite = values if math.isfinite(sum(values)) else [v for v in values if math.isfinite(v)]
        if finite:
            keep.add(bucket.start + values.index(min(finite)))
            keep.add(bucket.start + values.index(max(finite)))
        if len(finite) < len(values):
            keep.add(next(i for i in bucket if not math.isfinite(line.ys[i])))
    return [line[i] for i in sorted(keep)]


def means(points: Sequence[Point], limit: int = _POINTS // 2) -> list[Point]:
    """The mean of each of `limit` buckets, at the step in its middle; nan where a whole bucket is not finite."""
    line, found = _line(points), []
    for bucket in _buckets(len(line), min(limit, len(line))):
        values = line.ys[bucket.start : bucket.stop]
        total = sum(values)
        if math.isfinite(total):
            mean = total / len(values)
        else:
            finite = [v for v in values if math.isfinite(v)]
            # Divided before the sum: a sum of values near the largest float would overflow.
            mean = math.fsum(v / len(finite) for v in finite) if finite else math.nan
        found.append((line.xs[bucket[len(bucket) // 2]], mean))
    return found


def calm(buckets: Sequence[Point]) -> list[Point]:
    """The trend of buckets: a mean with triangular weights over about a twentieth of them.

    Of their medians of five, so that one spike does not become a hill. The page's script does the same for other widths.
    """
    values = [v for _, v in buckets]
    steady = [
        median(v for j in _around(i, 2, len(values)) if math.isfinite(v := values[j])) if math.isfinite(values[i]) else math.nan
        for i in range(len(values))
    ]
    reach = len(values) // 40 + 1
    result: list[Point] = []
    for i, (step, _) in enumerate(buckets):
        near = [(reach + 1 - abs(j - i), steady[j]) for j in _around(i, reach, len(steady)) if math.isfinite(steady[j])]
        total = sum(weight for weight, _ in near)
        # Summed afresh for each point: a running sum keeps the rounding error of every spike it has seen.
        result.append((step, math.fsum(weight / total * v for weight, v in near) if math.isfinite(steady[i]) else math.nan))
    return result


def smooth(points: Sequence[Point], limit: int = _POINTS // 2) -> list[Point]:
    """The trend of points, as `calm` of their `means`."""
    return calm(means(points, limit))


def typical(values: Sequence[float]) -> float:
    """The median of values, of very many that of some; 0 of none."""
    return median(values[:: len(values) // _SAMPLE + 1]) if values else 0.0


def _around(i: int, reach: int, length: int) -> range:
    """The indices around `i`. Symmetric at the start: losses fall steeply there, and a one-sided mean would hide how high they
    began. One-sided at the end: the last point should be a mean too, not one noisy record."""
    return range(i - min(reach, i), min(length, i + min(reach, i) + 1))


def _buckets(length: int, count: int) -> list[range]:
    edges = [length * i // count for i in range(count + 1)] if count else [0]
    return [range(a, b) for a, b in pairwise(edges)]
