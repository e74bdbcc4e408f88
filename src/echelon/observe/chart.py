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
from typing import Literal

from echelon.observe.columns import Line
from echelon.observe.thinning import calm, smooth, thin, typical

__all__ = ["Mark", "Scale", "Series", "figure", "log_label", "log_ticks", "script_json", "smooth", "thin", "tick_labels", "ticks"]

Point = tuple[float, float]

_POINTS = 1000  # drawn per line: more than a screen has columns
_MOST_MARKS = 200
_LEAST = 1e-290  # on a logarithmic axis: powers of ten below have fewer digits, and at last none


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Args:
        label: what legend and crosshair call it; any text.
        kind: how it is drawn. `faint` are single records behind a `smooth` line, `line` are single records alone, `points`
            are few and marked one by one.
        points: (step, value), steps finite and increasing; values may be nan or inf. Of a `smooth` line the means to be smoothed.
        run: the number of the run it is of, where a page shows several, each in a colour of its own.
    """

    label: str
    kind: Literal["faint", "smooth", "line", "points"]
    points: Sequence[Point]
    run: int | None = None


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step, for all charts of a page. The page's script knows their texts."""

    step: float
    kind: Literal["restart", "checkpoint"]
    text: str


@dataclass(frozen=True)
class Axis:
    """The axis of the values: its ends, and its ticks with their labels."""

    scale: Scale
    ticks: Sequence[tuple[float, str]]

    def payload(self) -> dict[str, object]:
        return {"y": [self.scale.low, self.scale.high], "ticks": [[value, name] for value, name in self.ticks]}


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


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that cover [low, high], 0 < low <= high; over less than two of them also twice and five times each."""
    if high < 100 * low and len(finer := _one_two_five(low, high)) <= 7:
        return finer
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


def _one_two_five(low: float, high: float) -> list[float]:
    marks = [float(f"{m}e{e}") for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)]
    first = max((i for i, mark in enumerate(marks) if mark <= low), default=0)
    last = next((i for i, mark in enumerate(marks) if mark >= high and i > first), len(marks) - 1)
    return marks[first : last + 1]


def log_label(value: float) -> str:
    exponent = math.floor(math.log10(value) + 1e-9)
    return f"{value:g}" if -3 <= exponent <= 3 else f"{value / 10.0**exponent:.0f}e{exponent}"


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
    legend: bool = False,
    marks: Sequence[Mark] = (),
    limit: int = _POINTS,
) -> str:
    """One chart as a `<figure>`: caption with legend, SVG, and the drawn records as JSON for the crosshair.

    Args:
        title, axis: name of the chart; name and unit of its values. Any text.
        series: drawn in this order; at least one point in all.
        steps: the horizontal axis; the same for all charts of a page, so that they can be compared.
        from_zero: the value axis begins at 0 unless a value is below.
        log: change to a logarithmic axis if a few values would flatten all others. A reader may ask for the other one.
        wide: as wide as the page; others stand side by side.
        legend: say what its lines and marks are.
        marks: what happened at some of the steps.
        limit: about so many points of each line are drawn.
    """
    drawn = [(s, s.points if s.kind == "smooth" else thin(s.points, limit)) for s in series]
    axes = _axes([v for _, points in drawn for _, v in points if math.isfinite(v)], from_zero=from_zero, log=log)
    payload = {"title": axis, "x": [steps.low, steps.high], **axes.payload(), "series": [_payload(s, p) for s, p in drawn]}
    name = f"{axis} (log scale)" if axes.is_log else axis
    parts = [
        f'<figure class="chart{" wide" if wide else ""}"><figcaption><b>{escape(title)}</b>',
        f"{_legend(series, marks if wide else (), legend)}</figcaption>",
        f'<div class="plot"><svg class="axes" role="img" aria-label="{escape(_summary(title, series))}">',
        f'<text class="name" x="0" y="0" dy="-14">{escape(name)}</text><g class="values">{_values_axis(axes.shown)}</g>',
        *_steps_axis(steps, 8 if wide else 5),
        *_marks(marks, steps),
        '<svg class="data" viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">',
        *(_group(s, calm(points) if s.kind == "smooth" else points, steps, axes.shown.scale) for s, points in drawn),
        _gap_marks((x for s in series if s.kind != "smooth" for x, v in _odd(s.points)), steps),
        '</svg><g class="cursor"><line y2="100%"/>',
        *(f'<circle class="{s.kind}{_run_class(s)}" r="4"/>' for s in series),
        '</g></svg><div class="tip" role="status"></div>',
        f'<script type="application/json">{script_json(payload)}</script></div></figure>',
    ]
    return "".join(parts)


@dataclass(frozen=True)
class Axes:
    """The two axes that values may be seen on; `powers` is None where no value is above 0."""

    plain: Axis
    powers: Axis | None
    is_log: bool

    @property
    def shown(self) -> Axis:
        return self.powers if self.is_log and self.powers is not None else self.plain

    def payload(self) -> dict[str, object]:
        powers = None if self.powers is None else self.powers.payload()
        return {"log": self.is_log, "plain": self.plain.payload(), "powers": powers}


def _axes(values: Sequence[float], *, from_zero: bool, log: bool) -> Axes:
    """Of thinned values, which have the same extremes as all."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    above = [v for v in values if v > _LEAST]
    powers = _powers(min(above), max(above)) if above else None
    is_log = log and low > _LEAST and high > 50 * typical(values)
    return Axes(_linear(min(low, 0.0) if from_zero else low, max(high, 0.0) if from_zero else high), powers, is_log)


def _linear(low: float, high: float) -> Axis:
    marks = ticks(low, high)
    return Axis(Scale(marks[0], marks[-1]), list(zip(marks, tick_labels(marks), strict=True)))


def _powers(low: float, high: float) -> Axis:
    marks = log_ticks(low, high)
    return Axis(Scale(marks[0], marks[-1], log=True), [(mark, log_label(mark)) for mark in marks])


def _run_class(series: Series) -> str:
    return "" if series.run is None else f" run r{series.run % 8}"


def _group(series: Series, points: Sequence[Point], steps: Scale, scale: Scale) -> str:
    of_run = "" if series.run is None else f' class="run r{series.run % 8}" data-run="{series.run}"'
    return f"<g{of_run}>{_paths(series.kind, points, steps, scale)}</g>"


def _odd(points: Sequence[Point]) -> Iterable[Point]:
    """Those that are not finite. Looked for in the sum first: hardly any line has one."""
    if isinstance(points, Line) and math.isfinite(sum(points.ys)):
        return []
    return (point for point in points if not math.isfinite(point[1]))


def _values_axis(axis: Axis) -> str:
    parts = []
    for value, name in axis.ticks:
        y = f"{100 - 100 * axis.scale.at(value):.3f}%"
        parts.append(f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/><text class="y" y="{y}" dx="-8" dy=".32em">{name}</text>')
    return "".join(parts)


def _marks(marks: Sequence[Mark], steps: Scale) -> list[str]:
    """A dashed line where a start of the run took over, a small triangle on the axis for a checkpoint."""
    parts = []
    for mark in [m for m in marks if steps.low <= m.step <= steps.high][-_MOST_MARKS:]:
        x = f"{100 * steps.at(mark.step):.3f}%"
        if mark.kind == "restart":
            parts.append(f'<line class="mark restart" x1="{x}" x2="{x}" y2="100%"/>')
        else:
            parts.append(f'<svg x="{x}" y="100%" class="at"><path class="mark checkpoint" d="M0-7l3.5 7h-7z"/></svg>')
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
    return [*parts, '<text class="x name" x="50%" y="100%" dy="35">update</text>']


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


def _legend(series: Sequence[Series], marks: Sequence[Mark], full: bool) -> str:
    """What the lines are, for a `full` legend, and how many values are not finite. Colours mean the same in all charts."""
    items = []
    if full and len(series) > 1:
        items = [f'<span class="key {s.kind}{_run_class(s)}">{escape(s.label)}</span>' for s in series]
    if full:
        items += [
            f'<span class="key {kind}">{kind}</span>' for kind in ("restart", "checkpoint") if any(m.kind == kind for m in marks)
        ]
    bad = Counter(f"{v:.0f}" for s in series if s.kind != "smooth" for _, v in _odd(s.points))
    if bad:
        items.append(f'<span class="key gap">not finite: {", ".join(f"{n} {v}" for v, n in sorted(bad.items()))}</span>')
    return f'<span class="legend">{"".join(items)}</span>' if items else ""


def _summary(title: str, series: Sequence[Series]) -> str:
    """The chart in words, for those who cannot see it."""
    parts: list[str] = []
    for s in series:
        if s.kind != "smooth" and s.points:
            (x0, v0), (x1, v1) = s.points[0], s.points[-1]
            parts.append(f"{s.label}, {len(s.points)} records from {v0:.4g} at update {x0:.12g} to {v1:.4g} at update {x1:.12g}")
    return f"{title}: {'; '.join(parts)}"


def _plain(value: float) -> float | str:
    """A number of 9 digits, enough to tell any two float32 apart; "nan", "inf" or "-inf" for what JSON has no number for."""
    return float(f"{value:.9g}") if math.isfinite(value) else f"{value:.0f}"


def _payload(series: Series, points: Sequence[Point]) -> dict[str, object]:
    xs = [int(x) if x == int(x) else x for x, _ in points]
    found: dict[str, object] = {"label": series.label, "kind": series.kind, "x": xs, "y": [_plain(v) for _, v in points]}
    return found if series.run is None else found | {"run": series.run}
