"""The charts of one or several runs over their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echelon.observe import chart
from echelon.observe.columns import Line
from echelon.observe.facts import Facts
from echelon.observe.page.figures import unit
from echelon.observe.page.shown import Shown
from echelon.observe.page.text import clean
from echelon.observe.thinning import means

__all__ = ["charts", "marks_of"]

_RATES = 4  # charts of throughput, at most: their number is the user's, the size of the page is ours
_OWN = 24  # charts of numbers of the user's own, at most
_SINGLE = 40  # records that are drawn one by one; more have noise worth smoothing
_POINTS = 1000  # of a line, of a page with one run
_GIB = float(1 << 30)

_KNOWN = {"step", "update", "time", "loss", "eval_loss", "lr", "grad_norm", "mfu", "alloc_retries"}
_MEMORY = {
    "memory_peak_bytes": "GPU, peak",
    "memory_reserved_bytes": "GPU, reserved",
    "host_memory_bytes": "process",
}


def charts(runs: Sequence[Shown]) -> str:
    """All charts, above one another the controls that change them."""
    spans = [span for each in runs if (span := each.facts.steps()) is not None]
    if not spans:
        return '<section><h2>Charts</h2><p class="none">metrics.jsonl has no record of an update.</p></section>'
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    pad = max(1.0, 1e-3 * abs(low)) if low == high else 0.0
    made = _Charts(runs, chart.Scale(low - pad, high + pad))
    found = [*made.usual(), *made.own()]
    if not found:
        return '<section><h2>Charts</h2><p class="none">No record in metrics.jsonl has a number to draw.</p></section>'
    marks = chart.script_json([[m.step, m.kind, m.text] for m in made.marks])
    data = f'<script type="application/json" id="marks">{marks}</script>'
    return f'<section aria-label="Charts">{_CONTROLS}<div class="charts">{"".join(found)}</div>{data}</section>'


def marks_of(facts: Facts) -> list[chart.Mark]:
    """Where later starts of the run took over, and where its checkpoints are."""
    marks = []
    for attempt in facts.attempts:
        for step, _ in attempt.saved():
            if step is not None:
                marks.append(chart.Mark(step, "checkpoint", "saved"))
        begun = attempt.first_step()
        if attempt.number > facts.attempts[0].number and begun is not None:
            marks.append(chart.Mark(begun, "restart", f"attempt {attempt.number} begins"))
    return sorted(marks, key=lambda mark: mark.step)


class _Charts:
    """One chart for each number, with a line for each run that has it."""

    def __init__(self, runs: Sequence[Shown], across: chart.Scale) -> None:
        self._runs, self._across, self._several = runs, across, len(runs) > 1
        self._limit = max(150, _POINTS // len(runs))
        self.marks = [] if self._several else marks_of(runs[0].facts)

    def usual(self) -> list[str]:
        loss = [*self._lines("training", "loss"), *self._points("evaluation", "eval_loss")]
        found = [self._figure("Loss", "loss", loss, log=True, wide=True, legend=not self._several)]
        found.append(self._figure("Learning rate", "lr", self._lines("lr", "lr", plain=True), from_zero=True))
        found.append(self._figure("Gradient norm", "L2 norm", self._lines("L2 norm", "grad_norm"), from_zero=True, log=True))
        rates = list(dict.fromkeys(key for each in self._runs for key in each.facts.rates()))
        found += [self._figure("Throughput", unit(k), self._lines(unit(k), k), from_zero=True) for k in rates[:_RATES]]
        mfu = self._lines("mfu", "mfu")
        found.append(self._figure("Model FLOPs utilization", "of the peak", mfu, from_zero=True))
        found.append(self._figure("Memory of rank 0", "GiB", self._memory(), from_zero=True, legend=not self._several))
        return [each for each in found if each]

    def _memory(self) -> list[chart.Series]:
        """Of one run each kind in a colour of its own; of several the first kind that there is."""
        kinds = [self._lines(label, key, plain=True, scale=1 / _GIB) for key, label in _MEMORY.items()]
        kinds = [kind for kind in kinds if kind]
        if self._several:
            return kinds[0] if kinds else []
        return [replace(series, run=n) for n, kind in enumerate(kinds) for series in kind]

    def own(self) -> list[str]:
        """Of the numbers that the user logged: training and evaluation in one chart."""
        names = dict.fromkeys(name for each in self._runs for name in each.facts.numbers.names())
        known = _KNOWN | _MEMORY.keys()
        mine = [n for n in names if n not in known and not n.endswith(("_per_s", "_per_s_per_device"))]
        titles = list(dict.fromkeys(name.removeprefix("eval_") for name in mine))
        found = []
        for title in titles[:_OWN]:
            series = [*self._lines("training", title), *self._points("evaluation", f"eval_{title}")]
            found.append(self._figure(clean(title, 60), "", series, log=True))
        return [each for each in found if each]

    def _figure(self, title: str, axis: str, series: list[chart.Series], **how: bool) -> str:
        if not series:
            return ""
        return chart.figure(title, axis, series, self._across, marks=self.marks, limit=self._limit, **how)

    def _lines(self, label: str, key: str, *, plain: bool = False, scale: float = 1.0) -> list[chart.Series]:
        """Single records faint behind their smooth line; alone where they are few; nothing for none."""
        found = []
        for each in self._runs:
            points = each.facts.points(key)
            if scale != 1.0:
                points = Line(points.xs, [scale * y for y in points.ys])
            name, run = (each.label, each.number) if self._several else (label, None)
            if points and (plain or len(points) <= _SINGLE):
                found.append(chart.Series(name, "line", points, run))
            elif points:
                found.append(chart.Series(name, "faint", points, run))
                smoothed = name if self._several else "smoothed"
                found.append(chart.Series(smoothed, "smooth", means(points, self._limit // 2), run))
        return found

    def _points(self, label: str, key: str) -> list[chart.Series]:
        found = []
        for each in self._runs:
            if points := each.facts.points(key):
                name, run = (f"{each.label}, {label}", each.number) if self._several else (label, None)
                found.append(chart.Series(name, "points", points, run))
        return found


_CONTROLS = """<form class="controls" hidden><h2>Charts</h2>
<label>Smoothing <input type="range" id="smoothing" min="0" max="4" value="2"> <output for="smoothing"></output></label>
<label>Values <select id="scale"><option value="fits">as fits</option><option value="plain">linear</option>
<option value="powers">logarithmic</option></select></label></form>"""
