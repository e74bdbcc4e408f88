"""The key numbers of a run, as a row of cards; for several runs, as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, takewhile
from statistics import median

from echelon.observe.amounts import BINARY, duration, milliseconds, quantity
from echelon.observe.columns import Line, finite
from echelon.observe.facts import Facts, get, word
from echelon.observe.report.runs import RunOnPage
from echelon.observe.report.text import NONE, safe, table

__all__ = ["compared", "figures", "planned_and_measured", "unit"]

_TAIL = 10  # records averaged in the final loss

Card = tuple[str, object, str]


def unit(key: str) -> str:
    """The unit of a throughput key, such as tokens/s."""
    return f"{key.removesuffix('_per_s')[:40]}/s"


def figures(shown: RunOnPage) -> str:
    """The row of key numbers, each with its name and an explanation."""
    items = (f'<div><dt>{n}</dt><dd>{safe(v, 40)}</dd><dd class="under">{safe(u, 60)}</dd></div>' for n, v, u in _cards(shown))
    return f'<dl class="figures">{"".join(items)}</dl>'


def planned_and_measured(facts: Facts) -> str:
    """The expectation of `run --plan` beside the measured values; empty for a run that was not planned."""
    planned = get(facts.about, "planned")
    peak, seconds = finite(get(planned, "peak")) or 0.0, finite(get(planned, "seconds")) or 0.0
    if peak <= 0:
        return ""
    measured = max(facts.points("memory_peak_bytes").finite(), default=0.0)
    rows = [["memory of a rank", quantity(peak, 1024, BINARY), *_beside(peak, measured, quantity(measured, 1024, BINARY))]]
    if seconds > 0:
        took = _update_seconds(facts)
        rows.append(["an update", milliseconds(seconds), *_beside(seconds, took, milliseconds(took))])
    on = f"{word(get(planned, 'layout')) or 'the layout'} on {word(get(planned, 'device')) or 'a device'}"
    return table("Planned and measured", [on, "planned", "measured, rank 0", "planned is off by"], rows, "")


def _beside(planned: float, measured: float, shown: str) -> tuple[str, str]:
    return (shown, f"{planned / measured - 1:+.1%}") if measured > 0 else (NONE, NONE)


def _update_seconds(facts: Facts) -> float:
    """The median time from one update to the next, which evaluations and restarts hardly change."""
    took = [later - at for (step, at), (after, later) in pairwise(facts.points("time")) if after == step + 1]
    return median(took) if took else 0.0


def compared(runs: Sequence[RunOnPage]) -> str:
    """The same numbers of several runs, one row each."""
    rows = []
    cards = [_cards(each) for each in runs]
    names = list(dict.fromkeys(name for of_run in cards for name, _, _ in of_run))
    for each, of_run in zip(runs, cards, strict=True):
        status, figures = each.facts.status(), {name: (value, under) for name, value, under in of_run}
        choice = (
            f'<label class="run r{each.number % 8}"><input type="checkbox" checked data-run="{each.number}"> '
            f"{safe(each.label, 60)}</label>"
        )
        cells = [f'<th scope="row">{choice}</th><td class="status {status.kind}">{safe(status.text, 60)}</td>']
        for name in names:
            value, under = figures.get(name, (NONE, ""))
            cells.append(f"<td>{safe(value, 40)}<small>{safe(under, 60)}</small></td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("Run", "Ended", *names))
    made = f'<table class="rows compared"><thead><tr>{head}</tr></thead>{"".join(rows)}</table>'
    return f'<div class="scroll" tabindex="0">{made}</div>'


def _cards(shown: RunOnPage) -> list[Card]:
    facts = shown.facts
    spans = [attempt.seconds() for attempt in facts.attempts]
    known = [seconds for seconds in spans if seconds is not None]
    failed = sum(attempt.status().kind == "failed" for attempt in facts.attempts)
    steps = facts.steps()
    cards: list[Card] = [
        _train_figure(facts.points("loss")),
        _eval_figure(facts.points("eval_loss")),
        ("Updates", f"{steps[1]:,.12g}" if steps else NONE, "of the optimizer"),
    ]
    for key in facts.rates()[:1]:
        values = facts.points(key).finite()
        cards.append(("Throughput", quantity(median(values)) if values else NONE, f"{unit(key)}, median"))
    cards += _device_figures(facts)
    ranks, launcher = word(facts.about.get("ranks")), word(facts.about.get("launcher"))
    partly = "of the attempts that are known" if len(known) < len(spans) else ""
    return [
        *cards,
        ("Wall time", duration(sum(known)) if known else NONE, partly),
        *([("Goodput", f"{shown.goodput.share:.0%}", "of the wall time")] if shown.goodput is not None else []),
        ("Ranks", ranks or NONE, launcher or ""),
        ("Attempts", len(facts.attempts), f"{failed} failed" if failed else ""),
    ]


def _device_figures(facts: Facts) -> list[Card]:
    """Rank 0's numbers of its device; on a CPU, the memory of its process."""
    cards: list[Card] = []
    if mfu := facts.points("mfu").finite():
        cards.append(("MFU", f"{median(mfu):.1%}", "of the device's peak, median"))
    if peak := facts.points("memory_peak_bytes").finite():
        reserved = max(facts.points("memory_reserved_bytes").finite(), default=0.0)
        retries = max(facts.points("alloc_retries").finite(), default=0.0)
        under = "peak on rank 0" + (f"; {quantity(reserved, 1024, BINARY)} reserved" if reserved else "")
        cards.append(("Memory", quantity(max(peak), 1024, BINARY), f"{under}, {retries:.0f} retries" if retries else under))
    elif host := facts.points("host_memory_bytes").finite():
        cards.append(("Memory", quantity(max(host), 1024, BINARY), "most of rank 0's process"))
    return cards


def _at(point: tuple[float, float]) -> str:
    return f"{point[1]:.4g} at update {point[0]:,.12g}"


def _train_figure(loss: Line) -> Card:
    if not loss:
        return "Train loss", NONE, "no record"
    last = loss[-1][1]
    if not math.isfinite(last):
        finite = [point for point in loss if math.isfinite(point[1])]
        return "Train loss", f"{last:.4g}", f"last finite: {_at(finite[-1])}" if finite else "never finite"
    # At most back to the last nan or inf, so that the mean is over consecutive records.
    tail = list(takewhile(math.isfinite, (value for _, value in loss[: -_TAIL - 1 : -1])))
    mean = sum(value / len(tail) for value in tail)
    return "Train loss", f"{mean:.4g}", f"mean of the last {len(tail)}" if len(tail) > 1 else "last record"


def _eval_figure(evals: Line) -> Card:
    if not evals:
        return "Eval loss", NONE, "no evaluation"
    best = min((point for point in evals if math.isfinite(point[1])), key=lambda point: point[1], default=None)
    return "Eval loss", f"{evals[-1][1]:.4g}", f"best: {_at(best)}" if best else "never finite"
