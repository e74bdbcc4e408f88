"""The data of the curves, which the page's script draws, and the same as a table for people who cannot see them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from echelon.observe.columns import Line
from echelon.observe.facts import Facts
from echelon.observe.report.figures import unit
from echelon.observe.report.runs import RunOnPage
from echelon.observe.report.text import NONE, clean, script_json, table

__all__ = ["charts", "limit_points", "means"]

Point = tuple[float, float]
_RATES = 4  # most charts of throughput, to limit the page's size
_OWN = 24  # most charts of the user's own numbers
_SINGLE = 40  # up to here records are drawn one by one; more are also smoothed
_POINTS = 1000  # per curve, on a page of one run: more than a screen has columns
_MARKS = 400
_GIB = float(1 << 30)

_KNOWN = {"step", "update", "time", "loss", "eval_loss", "lr", "grad_norm", "mfu", "alloc_retries"}
_MEMORY = {
    "memory_peak_bytes": "GPU, peak",
    "memory_reserved_bytes": "GPU, reserved",
    "host_memory_bytes": "process",
}


@dataclass(frozen=True)
class Curve:
    """One curve of a chart.

    Args:
        kind: how it is drawn. `faint`: single records behind a `smooth` curve; `line`: single records alone; `points`: a few
            records, each marked. The points of a `smooth` curve are means, which the page smooths.
        colour: number of the colour, if not the default of its kind: the run's, on a page of several runs.
    """

    label: str
    kind: Literal["faint", "smooth", "line", "points"]
    points: Line
    colour: int | None = None


def charts(runs: Sequence[RunOnPage]) -> str:
    """The section with the charts."""
    spans = [span for each in runs if (span := each.facts.steps()) is not None]
    if not spans:
        return '<section><h2>Charts</h2><p class="none">metrics.jsonl has no record of an update.</p></section>'
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    pad = max(1.0, 1e-3 * abs(low)) if low == high else 0.0
    made = _Charts(runs)
    made.usual()
    made.own()
    if not made.charts:
        return '<section><h2>Charts</h2><p class="none">No record in metrics.jsonl has a number to draw.</p></section>'
    marks = [] if len(runs) > 1 else marks_of(runs[0].facts)
    facts = script_json({"updates": [low - pad, high + pad], "marks": marks, "charts": made.charts})
    head = ["chart", "curve", "records", "first", "lowest", "highest", "last", "not finite"]
    curves = table("The curves as a table", head, made.rows, "", most=len(made.rows), folded=True)
    drawn = f'{_CONTROLS}<div class="charts"></div><div class="curves" id="curves">{curves}</div>'
    return f'<section aria-label="Charts">{drawn}</section><script type="application/json" id="facts">{facts}</script>'


def marks_of(facts: Facts) -> list[tuple[float, str, str]]:
    """(step, kind, text) where later attempts took over, and at the latest checkpoints."""
    first = facts.attempts[0].number if facts.attempts else 0
    saved = [(step, "checkpoint", "saved") for attempt in facts.attempts for step, _ in attempt.saved() if step is not None]
    begun = [
        (step, "restart", f"attempt {attempt.number} begins")
        for attempt in facts.attempts
        if attempt.number > first and (step := attempt.first_step()) is not None
    ]
    return sorted(saved[-_MARKS:] + begun[-_MARKS:])


class _Charts:
    """One chart per number, with a curve for each run that has it.

    Attributes:
        charts: the data for the page's script.
        rows: the same curves as table rows.
    """

    def __init__(self, runs: Sequence[RunOnPage]) -> None:
        self._runs, self._several = runs, len(runs) > 1
        self._limit = max(150, _POINTS // len(runs))
        self.charts: list[dict[str, Any]] = []
        self.rows: list[list[object]] = []

    def usual(self) -> None:
        legend = not self._several
        loss = [*self._lines("training", "loss"), *self._points("evaluation", "eval_loss")]
        self._add("Loss", "loss", loss, log=True, wide=True, legend=legend)
        self._add("Learning rate", "lr", self._lines("lr", "lr", plain=True), from_zero=True)
        self._add("Gradient norm", "L2 norm", self._lines("L2 norm", "grad_norm"), from_zero=True, log=True)
        for key in list(dict.fromkeys(key for each in self._runs for key in each.facts.rates()))[:_RATES]:
            self._add("Throughput", unit(key), self._lines(unit(key), key), from_zero=True)
        self._add("Model FLOPs utilization", "of the peak", self._lines("mfu", "mfu"), from_zero=True)
        self._add("Memory of rank 0", "GiB", self._memory(), from_zero=True, legend=legend)

    def own(self) -> None:
        """Add charts of the numbers that the user logged: training and evaluation in one chart."""
        names = dict.fromkeys(name for each in self._runs for name in each.facts.numbers.names())
        known = _KNOWN | _MEMORY.keys()
        own = [n for n in names if n not in known and not n.endswith(("_per_s", "_per_s_per_device"))]
        for title in list(dict.fromkeys(name.removeprefix("eval_") for name in own))[:_OWN]:
            self._add(title, "", [*self._lines("training", title), *self._points("evaluation", f"eval_{title}")], log=True)

    def _memory(self) -> list[Curve]:
        """For one run, each kind in its own colour; for several runs, the first available kind."""
        kinds = []
        for key, label in _MEMORY.items():
            lines = self._lines(label, key, plain=True)
            kinds.append([Curve(c.label, c.kind, Line(c.points.xs, [y / _GIB for y in c.points.ys]), c.colour) for c in lines])
        kinds = [kind for kind in kinds if kind]
        if self._several:
            return kinds[0] if kinds else []
        return [Curve(c.label, c.kind, c.points, n) for n, kind in enumerate(kinds) for c in kind]

    def _lines(self, label: str, key: str, *, plain: bool = False) -> list[Curve]:
        """Single records, faint behind their smooth curve; alone if they are few; empty without records."""
        curves = []
        for each in self._runs:
            points = each.facts.points(key)
            name, colour = (each.label, each.number) if self._several else (label, None)
            if points and (plain or len(points) <= _SINGLE):
                curves.append(Curve(name, "line", points, colour))
            elif points:
                curves.append(Curve(name, "faint", points, colour))
                smoothed = name if self._several else "smoothed"
                curves.append(Curve(smoothed, "smooth", means(points, self._limit // 2), colour))
        return curves

    def _points(self, label: str, key: str) -> list[Curve]:
        return [
            Curve(f"{each.label}, {label}" if self._several else label, "points", points, each.number if self._several else None)
            for each in self._runs
            if (points := each.facts.points(key))
        ]

    def _add(self, title: str, name: str, curves: Sequence[Curve], **how: bool) -> None:
        """Add a chart, if it has a curve.

        Args:
            how: `from_zero`: the axis begins at 0, or below for negative values. `log`: use a logarithmic axis if a few values
                would flatten all others. `wide`: as wide as the page. `legend`: name the curves and marks.
        """
        if not curves:
            return
        series, bad = [], Counter[str]()
        for curve in curves:
            points = curve.points if curve.kind == "smooth" else limit_points(curve.points, self._limit)
            series.append(_payload(curve, points))
            if curve.kind != "smooth":
                gaps = _not_finite(curve.points)
                bad += gaps
                self.rows.append([clean(title, 60), clean(curve.label), *_in_words(curve.points, points), _counts(gaps) or NONE])
        chart = {"title": clean(title, 60), "unit": clean(name, 60), "series": series, **how}
        self.charts.append(chart | ({"not_finite": _counts(bad)} if bad else {}))


def _payload(curve: Curve, points: Line) -> dict[str, object]:
    xs = [int(x) if x == int(x) else x for x in points.xs]
    payload: dict[str, object] = {"label": clean(curve.label), "kind": curve.kind, "x": xs, "y": [_plain(v) for v in points.ys]}
    return payload if curve.colour is None else payload | {"run": curve.colour}


def _plain(value: float) -> float | str:
    """A number in 9 digits, enough to tell any two float32 apart; "nan", "inf" or "-inf" for values that JSON lacks."""
    return float(f"{value:.9g}") if math.isfinite(value) else f"{value:.0f}"


def _not_finite(line: Line) -> Counter[str]:
    """Counts of values that are not finite. Checks the sum first, since few lines have any."""
    return Counter() if math.isfinite(sum(line.ys)) else Counter(f"{v:.0f}" for v in line.ys if not math.isfinite(v))


def _counts(bad: Counter[str]) -> str:
    return ", ".join(f"{n} {value}" for value, n in sorted(bad.items()))


def _in_words(line: Line, thinned: Line) -> list[str]:
    """Number of records, and the first, lowest, highest and last; thinned points have the same extremes as all points."""
    finite = [point for point in thinned if math.isfinite(point[1])]
    by_value = sorted(finite, key=lambda point: point[1])
    ends: list[Point | None] = [line[0], *((by_value[0], by_value[-1]) if by_value else (None, None)), line[-1]]
    return [f"{len(line):,}", *(NONE if p is None else f"{p[1]:.4g} at {p[0]:,.12g}" for p in ends)]


_CONTROLS = """<form class="controls" hidden><h2>Charts</h2>
<label>Smoothing <input type="range" id="smoothing" min="0" max="4" value="2"> <output for="smoothing"></output></label>
<label>Values <select id="scale"><option value="fits">as fits</option><option value="plain">linear</option>
<option value="powers">logarithmic</option></select></label><button type="button" id="whole" hidden>Show all updates</button>
</form><noscript><h2>Charts</h2><p class="none">The curves are drawn by a script of this page, which does not run here.
Below they are in a table.</p></noscript>"""


def limit_points(line: Line, limit: int) -> Line:
    """At most about `limit` points: from each section the lowest, the highest, and one that is not finite.

    A spike or gap of one record stays visible, and every point is an original record. First and last always stay.
    """
    if len(line) <= limit:
        return line
    keep = {0, len(line) - 1}
    for stretch in _stretches(len(line), limit // 2):
        values = line.ys[stretch.start : stretch.stop]
        # The sum of finite values may overflow; then the filter runs without need.
        finite = values if math.isfinite(sum(values)) else [v for v in values if math.isfinite(v)]
        if finite:
            keep.add(stretch.start + values.index(min(finite)))
            keep.add(stretch.start + values.index(max(finite)))
        if len(finite) < len(values):
            keep.add(next(i for i in stretch if not math.isfinite(line.ys[i])))
    order = sorted(keep)
    return Line([line.xs[i] for i in order], [line.ys[i] for i in order])


def means(line: Line, limit: int) -> Line:
    """The mean of each of `limit` sections, at its middle step; nan if no value of a section is finite."""
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
