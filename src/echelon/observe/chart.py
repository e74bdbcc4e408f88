"""Charts as text: series of (step, value) become a `<figure>` with an inline SVG, readable without any script.

The SVG has no viewBox: it is as wide as its box, labels stand at percentages and keep their size, and only the data lies in
a nested, stretched SVG of 1000 x 1000 units. So one text serves a wide screen, a column of three and a phone.
`chart_page` has the style, and the crosshair that reads the JSON in each figure. Knows nothing of runs or files.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from itertools import pairwise
from statistics import median
from typing import Literal

__all__ = ["Scale", "Series", "figure", "script_json", "smooth", "thin", "tick_labels", "ticks"]

Point = tuple[float, float]

_POINTS = 1000  # drawn per line: more than a screen has columns


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Args:
        label: what legend and crosshair call it; any text.
        kind: how it is drawn. `faint` are single records behind a `smooth` line, `line` are single records alone, `points`
            are few and marked one by one.
        points: (step, value), steps finite and increasing; values may be nan or inf.
    """

    label: str
    kind: Literal["faint", "smooth", "line", "points"]
    points: Sequence[Point]


@dataclass(frozen=True)
class Scale:
    """The position of a value between the ends of an axis, 0 to 1."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)


def ticks(low: float, high: float, *, count: int = 5, whole: bool = False) -> list[float]:
    """Nice numbers (1, 2 or 5 times a power of ten) that cover [low, high]: about `count` of them, increasing.

    Args:
        low, high: finite, low <= high, at most 1e300 in size. A range too narrow to be told apart is widened.
        whole: whole numbers only, for counts such as steps.
    """
    size = max(abs(low), abs(high))
    if high - low <= max(1e-6 * size, 1e-300):
        pad = 0.05 * size if size > 1e-300 else 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / count
    power = Fraction(10) ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    if whole:
        step = max(step, Fraction(1))
    # Fractions of the decimal text, not floats: 0.3 / 0.1 is 2.9999999999999996 and would add a tick at 0.2.
    first = math.floor(Fraction(repr(float(low))) / step)
    last = math.ceil(Fraction(repr(float(high))) / step)
    return [float(n * step) for n in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that cover [low, high], 0 < low < high."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / 6))
    return [10.0**e for e in range(first, last + stride, stride)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Texts for evenly spaced values, all with the same decimals and the same suffix (k, M, G, T or an exponent)."""
    top = max(abs(v) for v in values)
    step = values[1] - values[0]
    exponent, suffix = 0, ""
    if 1e4 <= top < 1e15:
        exponent = 3 * (math.floor(math.log10(top)) // 3)
        suffix = {3: "k", 6: "M", 9: "G", 12: "T"}[exponent]
    elif not 1e-3 <= top < 1e4:
        exponent = math.floor(math.log10(top))
        suffix = f"e{exponent}"
    # + 1e-9: the step is 1, 2 or 5 times a power of ten, so this only undoes the rounding of its logarithm.
    decimals = max(0, exponent - math.floor(math.log10(step) + 1e-9))
    return ["0" if v == 0 else f"{v / 10.0**exponent:.{decimals}f}{suffix}" for v in values]


def _log_label(value: float) -> str:
    exponent = round(math.log10(value))
    return f"{value:g}" if -3 <= exponent <= 3 else f"1e{exponent}"


def thin(points: Sequence[Point], limit: int = _POINTS) -> list[Point]:
    """At most about `limit` of the points: of each bucket the lowest, the highest and one that is not finite.

    A spike or a gap of one record stays visible, and every point is a record as it was written. First and last always stay.
    """
    if len(points) <= limit:
        return list(points)
    keep = {0, len(points) - 1}
    for bucket in _buckets(len(points), limit // 2):
        finite = [i for i in bucket if math.isfinite(points[i][1])]
        if finite:
            keep.add(min(finite, key=lambda i: points[i][1]))
            keep.add(max(finite, key=lambda i: points[i][1]))
        if len(finite) < len(bucket):
            keep.add(next(i for i in bucket if not math.isfinite(points[i][1])))
    return [points[i] for i in sorted(keep)]


def smooth(points: Sequence[Point], limit: int = _POINTS // 2) -> list[Point]:
    """The trend: a mean with triangular weights over about a twentieth of the series; nan where a whole bucket is not finite.

    Works on bucket means, so that it is cheap, and on their median of five, so that one spike does not become a hill.
    """
    steps: list[float] = []
    means: list[float] = []
    for bucket in _buckets(len(points), min(limit, len(points))):
        finite = [points[i][1] for i in bucket if math.isfinite(points[i][1])]
        steps.append(points[bucket[len(bucket) // 2]][0])
        # Divided before the sum: a sum of values near the largest float would overflow.
        means.append(math.fsum(v / len(finite) for v in finite) if finite else math.nan)
    calm = [
        median(v for j in _around(i, 2, len(means)) if math.isfinite(v := means[j])) if math.isfinite(means[i]) else math.nan
        for i in range(len(means))
    ]
    reach = len(means) // 40 + 1
    result: list[Point] = []
    for i, step in enumerate(steps):
        near = [(reach + 1 - abs(j - i), calm[j]) for j in _around(i, reach, len(calm)) if math.isfinite(calm[j])]
        total = sum(weight for weight, _ in near)
        # Summed afresh for each point: a running sum keeps the rounding error of every spike it has seen.
        result.append((step, math.fsum(weight / total * v for weight, v in near) if math.isfinite(calm[i]) else math.nan))
    return result


def _around(i: int, reach: int, length: int) -> range:
    """The indices around `i`. Symmetric at the start: losses fall steeply there, and a one-sided mean would hide how high they
    began. One-sided at the end: the last point should be a mean too, not one noisy record."""
    return range(i - min(reach, i), min(length, i + min(reach, i) + 1))


def _buckets(length: int, count: int) -> list[range]:
    edges = [length * i // count for i in range(count + 1)] if count else [0]
    return [range(a, b) for a, b in pairwise(edges)]


def script_json(value: object) -> str:
    """JSON that may stand inside `<script>`: no character in it can end the element. Non-ASCII is escaped by json itself."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def figure(
    title: str,
    axis: str,
    series: Sequence[Series],
    steps: Scale,
    *,
    from_zero: bool = False,
    log: bool = False,
    wide: bool = False,
) -> str:
    """One chart as a `<figure>`: caption with legend, SVG, and the drawn records as JSON for the crosshair.

    Args:
        title, axis: name of the chart; name and unit of its values. Any text.
        series: drawn in this order; at least one point in all.
        steps: the horizontal axis; the same for all charts of a page, so that they can be compared.
        from_zero: the value axis begins at 0 unless a value is below.
        log: change to a logarithmic axis if a few values would flatten all others.
        wide: as wide as the page and with a legend; others stand side by side.
    """
    values = [v for s in series for _, v in s.points if math.isfinite(v)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if log and low > 0 and high > 50 * median(values):
        marks = _log_ticks(low, high)
        scale, names = Scale(marks[0], marks[-1], log=True), [_log_label(m) for m in marks]
        axis = f"{axis} (log scale)"
    else:
        marks = ticks(min(low, 0.0) if from_zero else low, max(high, 0.0) if from_zero else high)
        scale, names = Scale(marks[0], marks[-1]), tick_labels(marks)
    drawn = [(s, thin(s.points)) for s in series]
    parts = [
        f'<figure class="chart{" wide" if wide else ""}"><figcaption><b>{escape(title)}</b>{_legend(series, wide)}</figcaption>',
        f'<div class="plot"><svg class="axes" role="img" aria-label="{escape(_summary(title, series))}">',
        *_axes(axis, scale, list(zip(marks, names, strict=True))),
        *_steps_axis(steps, 8 if wide else 5),
        '<svg class="data" viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">',
        *(_paths(s.kind, points, steps, scale) for s, points in drawn),
        _gap_marks((x for s in series if s.kind != "smooth" for x, v in s.points if not math.isfinite(v)), steps),
        '</svg><g class="cursor"><line y2="100%"/>',
        *(f'<circle class="{s.kind}" r="4"/>' for s in series),
        '</g></svg><div class="tip" role="status"></div>',
        f'<script type="application/json">{script_json(_payload(drawn, steps, scale))}</script></div></figure>',
    ]
    return "".join(parts)


def _axes(title: str, scale: Scale, marks: Sequence[tuple[float, str]]) -> list[str]:
    parts = [f'<text class="name" x="0" y="0" dy="-14">{escape(title)}</text>']
    for value, name in marks:
        y = f"{100 - 100 * scale.at(value):.3f}%"
        parts.append(f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/><text class="y" y="{y}" dx="-8" dy=".32em">{name}</text>')
    return parts


def _steps_axis(steps: Scale, count: int) -> list[str]:
    parts = ['<line class="base" x2="100%" y1="100%" y2="100%"/>']
    # The ends of this axis are the first and the last step, so ticks beyond them are left out: no empty strip at the right.
    across = ticks(steps.low, steps.high, count=count, whole=True)
    for value, name in zip(across, tick_labels(across), strict=True):
        if steps.low <= value <= steps.high:
            x = f"{100 * steps.at(value):.3f}%"
            parts.append(f'<svg x="{x}" y="100%" class="at"><line class="base" y2="5"/></svg>')
            parts.append(f'<text class="x" x="{x}" y="100%" dy="18">{name}</text>')
    return [*parts, '<text class="x name" x="50%" y="100%" dy="35">step</text>']


def _paths(kind: str, points: Sequence[Point], steps: Scale, scale: Scale) -> str:
    """The line, broken where a value is not finite. A record between two gaps, and each of `points`, is a dot."""
    line: list[str] = []
    dots: list[str] = []
    run: list[str] = []
    for x, v in [*points, (0.0, math.nan)]:
        if math.isfinite(v):
            run.append(f"{1000 * steps.at(x):.1f},{1000 - 1000 * scale.at(v):.1f}")
            continue
        if len(run) > 1:
            line.append("M" + "L".join(run))
        if len(run) == 1 or kind == "points":
            dots += [f"M{at}h0" for at in run]  # without length: round caps draw a dot that the stretching leaves round
        run = []
    text = f'<path class="{kind}" d="{"".join(line)}"/>' if line else ""
    if dots:
        text += f'<path class="{kind} halo" d="{"".join(dots)}"/>' if kind == "points" else ""
        text += f'<path class="{kind} dot" d="{"".join(dots)}"/>'
    return text


def _gap_marks(xs: Iterable[float], steps: Scale) -> str:
    # Rounded to a 250th of the width: 50,000 records of nan are one bar, not 50,000 marks.
    places = sorted({round(250 * steps.at(x)) for x in xs})
    return f'<path class="gap" d="{"".join(f"M{4 * p},1000v-30" for p in places)}"/>' if places else ""


def _legend(series: Sequence[Series], full: bool) -> str:
    """What the lines are, for a `full` legend, and how many values are not finite. Colours mean the same in all charts."""
    items = [f'<span class="key {s.kind}">{escape(s.label)}</span>' for s in series] if full and len(series) > 1 else []
    bad = Counter(f"{v:.0f}" for s in series if s.kind != "smooth" for _, v in s.points if not math.isfinite(v))
    if bad:
        items.append(f'<span class="key gap">not finite: {", ".join(f"{n} {v}" for v, n in sorted(bad.items()))}</span>')
    return f'<span class="legend">{"".join(items)}</span>' if items else ""


def _summary(title: str, series: Sequence[Series]) -> str:
    """The chart in words, for those who cannot see it."""
    parts: list[str] = []
    for s in series:
        if s.kind != "smooth" and s.points:
            (x0, v0), (x1, v1) = s.points[0], s.points[-1]
            parts.append(f"{s.label}, {len(s.points)} records from {v0:.4g} at step {x0:.12g} to {v1:.4g} at step {x1:.12g}")
    return f"{title}: {'; '.join(parts)}"


def _plain(value: float) -> float | str:
    """A number of 9 digits, enough to tell any two float32 apart; "nan", "inf" or "-inf" for what JSON has no number for."""
    return float(f"{value:.9g}") if math.isfinite(value) else f"{value:.0f}"


def _payload(drawn: Sequence[tuple[Series, Sequence[Point]]], steps: Scale, scale: Scale) -> dict[str, object]:
    lines: list[dict[str, object]] = []
    for s, points in drawn:
        xs = [int(x) if x == int(x) else x for x, _ in points]
        lines.append({"label": s.label, "kind": s.kind, "x": xs, "y": [_plain(v) for _, v in points]})
    return {"x": [steps.low, steps.high], "y": [scale.low, scale.high], "log": scale.log, "series": lines}
