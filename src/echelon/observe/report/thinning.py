"""Fewer points that show the same: the extremes of every stretch, and its mean."""

from __future__ import annotations

import math
from itertools import pairwise

from echelon.observe.columns import Line

__all__ = ["Point", "limit_points", "means"]

Point = tuple[float, float]


def limit_points(line: Line, limit: int) -> Line:
    """At most about `limit` of the points: of each stretch the lowest, the highest and one that is not finite.

    A spike or a gap of one record stays visible, and every point is a record as it was written. First and last always stay.
    """
    if len(line) <= limit:
        return line
    keep = {0, len(line) - 1}
    for stretch in _stretches(len(line), limit // 2):
        values = line.ys[stretch.start : stretch.stop]
        # The sum of finite values may overflow, and then the slow way is taken for nothing.
        finite = values if math.isfinite(sum(values)) else [v for v in values if math.isfinite(v)]
        if finite:
            keep.add(stretch.start + values.index(min(finite)))
            keep.add(stretch.start + values.index(max(finite)))
        if len(finite) < len(values):
            keep.add(next(i for i in stretch if not math.isfinite(line.ys[i])))
    order = sorted(keep)
    return Line([line.xs[i] for i in order], [line.ys[i] for i in order])


def means(line: Line, limit: int) -> Line:
    """The mean of each of `limit` stretches, at the step in its middle; nan where a whole stretch is not finite."""
    xs, ys = [], []
    for stretch in _stretches(len(line), min(limit, len(line))):
        values = line.ys[stretch.start : stretch.stop]
        total = sum(values)
        if math.isfinite(total):
            mean = total / len(values)
        else:
            finite = [v for v in values if math.isfinite(v)]
            # Divided before the sum: a sum of values near the largest float would overflow.
            mean = math.fsum(v / len(finite) for v in finite) if finite else math.nan
        xs.append(line.xs[stretch[len(stretch) // 2]])
        ys.append(mean)
    return Line(xs, ys)


def _stretches(length: int, count: int) -> list[range]:
    edges = [length * i // count for i in range(count + 1)] if count else [0]
    return [range(a, b) for a, b in pairwise(edges)]
