"""The report: one run folder as one HTML page that works offline, in an e-mail or in an archive.

Reads nothing but the folder and changes nothing in it except `report.html`. What is missing or cut off is said on the page, never
an error: a report is wanted most for the run that went wrong. All text from files counts as hostile and is escaped in `_text`.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from html import escape
from itertools import takewhile
from pathlib import Path
from statistics import median

from echelon.contracts.errors import UsageError
from echelon.contracts.files import write_whole
from echelon.contracts.redact import redacted, redacted_words
from echelon.contracts.run_dir import RunDir
from echelon.observe import chart, chart_page
from echelon.observe.facts import Attempt, Facts, children, get, number, read, size_bytes, word

__all__ = ["render", "write"]

_RATES = 4  # charts of throughput, at most: their number is the user's, the size of the page is ours
_ROWS = 50  # rows of a table, at most
_TAIL = 10  # records in the final loss
_SINGLE = 40  # records that are drawn one by one; more have noise worth smoothing
_NONE = "\N{EN DASH}"
_BINARY = (" B", " KiB", " MiB", " GiB", " TiB")

# Also what would turn the direction of the text around it.
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def write(run: RunDir) -> Path:
    """Write the page to `run.report` for this user alone, so that a reader sees the old or the new page, never half of one.

    Returns:
        The path of the page.
    Raises:
        UsageError: the run's folder does not exist.
    """
    if not run.path.is_dir():
        raise UsageError(f"there is no run folder at {run.path}. Give the path of a folder that a run has written.")
    write_whole(run.report, render(run))
    return run.report


def render(run: RunDir) -> str:
    """The page as text. The same folder gives the same text, whenever it is rendered."""
    facts = read(run)
    status = facts.status()
    parts = [
        _HEAD.format(title=_text(f"{facts.name}: {status.text}", 300), style=_STYLE + chart_page.STYLE),
        f'<header><h1>{_text(facts.name, 200)}</h1><p><span class="status {status.kind}">{_text(status.text, 100)}</span> ',
        f"{_text(redacted(status.detail), 300)}{_MORE if status.kind == 'failed' else ''}</p></header>",
        _figures(facts),
        _notes(facts.notes),
        _charts(facts),
        _failure(facts.attempts[-1]) if status.kind == "failed" else "",
        _attempts_table(facts.attempts),
        _checkpoints_table(run, facts),
        _run_table(run, facts.about),
        f"</main><script>{chart_page.SCRIPT}</script></body></html>\n",
    ]
    # JSON may hold half a surrogate pair, which no file can.
    return "".join(parts).encode("utf-8", "replace").decode("utf-8")


def _text(value: object, limit: int = 500) -> str:
    """Escaped text without control characters; only the end of it if it is longer than `limit`."""
    text = _UNPRINTABLE.sub("", str(value))
    return escape(text if len(text) <= limit else f"… {text[-limit:]}")


def _when(seconds: float | None) -> str:
    try:
        return "unknown" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):  # not a time that any clock has shown
        return "unknown"


def _duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def _quantity(value: float, base: int = 1000, units: Sequence[str] = ("", "k", "M", "G", "T")) -> str:
    """Four digits and a unit: 12.35k."""
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:.4g}{units[power]}"


def _at(point: chart.Point) -> str:
    return f"{point[1]:.4g} at step {point[0]:,.12g}"


def _figures(facts: Facts) -> str:
    """The row of key numbers: name, number, and what it is the number of."""
    steps = [step for step, _ in [*facts.train, *facts.evals]]
    updates = [u for _, record in facts.train if (u := number(record.get("update"))) is not None]
    spans = [attempt.seconds() for attempt in facts.attempts]
    known = [seconds for seconds in spans if seconds is not None]
    failed = sum(attempt.status().kind == "failed" for attempt in facts.attempts)
    cards: list[tuple[str, object, str]] = [
        _train_figure(facts.points("loss")),
        _eval_figure(facts.eval_points()),
        ("Steps", f"{max(steps):,.12g}" if steps else _NONE, f"{max(updates):,.12g} updates" if updates else "no updates"),
    ]
    for key in facts.rates()[:1]:
        values = [v for _, v in facts.points(key) if math.isfinite(v)]
        cards.append(("Throughput", _quantity(median(values)) if values else _NONE, f"{_unit(key)}, median"))
    cards += _device_figures(facts)
    ranks, launcher = word(facts.about.get("ranks")), word(facts.about.get("launcher"))
    partly = "of the attempts that are known" if len(known) < len(spans) else ""
    cards += [
        ("Wall time", _duration(sum(known)) if known else _NONE, partly),
        ("Ranks", ranks or _NONE, launcher or ""),
        ("Attempts", len(facts.attempts), f"{failed} failed" if failed else ""),
    ]
    items = (f'<div><dt>{name}</dt><dd>{_text(v, 40)}</dd><dd class="under">{_text(u, 60)}</dd></div>' for name, v, u in cards)
    return f'<dl class="figures">{"".join(items)}</dl>'


def _device_figures(facts: Facts) -> list[tuple[str, object, str]]:
    """What rank 0 said of its device; nothing of a CPU."""
    cards: list[tuple[str, object, str]] = []
    if mfu := [v for _, v in facts.points("mfu") if math.isfinite(v)]:
        cards.append(("MFU", f"{median(mfu):.1%}", "of the device's peak, median"))
    if peak := [v for _, v in facts.points("memory_peak_bytes") if math.isfinite(v)]:
        reserved = max((v for _, v in facts.points("memory_reserved_bytes") if math.isfinite(v)), default=0.0)
        retries = max((v for _, v in facts.points("alloc_retries") if math.isfinite(v)), default=0.0)
        under = f"peak on rank 0; {_quantity(reserved, 1024, _BINARY)} reserved"
        cards.append(("Memory", _quantity(max(peak), 1024, _BINARY), f"{under}, {retries:.0f} retries" if retries else under))
    return cards


def _train_figure(loss: Sequence[chart.Point]) -> tuple[str, object, str]:
    if not loss:
        return "Train loss", _NONE, "no record"
    last = loss[-1][1]
    if not math.isfinite(last):
        finite = [point for point in loss if math.isfinite(point[1])]
        return "Train loss", f"{last:.4g}", f"last finite: {_at(finite[-1])}" if finite else "never finite"
    # Back to the last nan or inf at most: the mean is of records that follow each other.
    tail = list(takewhile(math.isfinite, (value for _, value in loss[: -_TAIL - 1 : -1])))
    mean = sum(value / len(tail) for value in tail)
    return "Train loss", f"{mean:.4g}", f"mean of the last {len(tail)}" if len(tail) > 1 else "last record"


def _eval_figure(evals: Sequence[chart.Point]) -> tuple[str, object, str]:
    if not evals:
        return "Eval loss", _NONE, "no evaluation"
    best = min((point for point in evals if math.isfinite(point[1])), key=lambda point: point[1], default=None)
    return "Eval loss", f"{evals[-1][1]:.4g}", f"best: {_at(best)}" if best else "never finite"


def _notes(notes: Sequence[str]) -> str:
    shown = [*notes[:20], *([f"… and {len(notes) - 20} more."] if len(notes) > 20 else [])]
    return f'<ul class="notes">{"".join(f"<li>{_text(note)}</li>" for note in shown)}</ul>' if notes else ""


def _unit(key: str) -> str:
    return f"{key.removesuffix('_per_s')[:40]}/s"


def _charts(facts: Facts) -> str:
    steps = [step for step, _ in [*facts.train, *facts.evals]]
    if not steps:
        return '<section><h2>Charts</h2><p class="none">metrics.jsonl has no record with a step.</p></section>'
    low, high = min(steps), max(steps)
    pad = max(1.0, 1e-3 * abs(low)) if low == high else 0.0
    across = chart.Scale(low - pad, high + pad)
    evals = facts.eval_points()
    loss = [*_lines("training", facts.points("loss")), *([chart.Series("evaluation", "points", evals)] if evals else [])]
    figures = [chart.figure("Loss", "loss", loss, across, log=True, wide=True)] if loss else []
    if lr := facts.points("lr"):
        figures.append(chart.figure("Learning rate", "lr", [chart.Series("lr", "line", lr)], across, from_zero=True))
    if norm := _lines("L2 norm", facts.points("grad_norm")):
        figures.append(chart.figure("Gradient norm", "L2 norm", norm, across, from_zero=True, log=True))
    for key in facts.rates()[:_RATES]:
        if rate := _lines(_unit(key), facts.points(key)):
            figures.append(chart.figure("Throughput", _unit(key), rate, across, from_zero=True))
    if mfu := _lines("mfu", facts.points("mfu")):
        figures.append(chart.figure("Model FLOPs utilization", "of the peak", mfu, across, from_zero=True))
    if not figures:
        return '<section><h2>Charts</h2><p class="none">No record in metrics.jsonl has a number to draw.</p></section>'
    return f'<section class="charts">{"".join(figures)}</section>'


def _lines(label: str, points: Sequence[chart.Point]) -> list[chart.Series]:
    """Single records faint behind their smooth line; alone where they are few; nothing for none."""
    if len(points) <= _SINGLE:
        return [chart.Series(label, "line", points)] if points else []
    return [chart.Series(label, "faint", points), chart.Series("smoothed", "smooth", chart.smooth(points))]


def _failure(attempt: Attempt) -> str:
    failure = attempt.failure()
    if failure is None:
        heading = "Failure"
        body = f"<p>No rank reported why. The output of the ranks is in attempts/{attempt.number:03d}/.</p>"
    else:
        heading = f"Failure on {failure.where()}: {failure.kind or 'unknown kind'}"
        body = f"<p>{_text(redacted(failure.message or 'no message'), 4000)}</p>"
        body += f'<pre tabindex="0">{_text(redacted(failure.traceback or "no traceback"), 20_000)}</pre>'
    return f'<section class="failure" id="failure"><h2>{_text(heading, 200)}</h2>{body}</section>'


def _attempts_table(attempts: Sequence[Attempt]) -> str:
    rows: list[list[object]] = []
    for attempt in attempts:
        status, failure, saved = attempt.status(), attempt.failure(), attempt.saved()
        took = _duration(attempt.seconds()) + (", to its last event" if attempt.exit is None and attempt.events else "")
        step = saved[-1][0] if saved else None
        kept = f"{len(saved)}, last at step {'unknown' if step is None else f'{step:,.12g}'}" if saved else "none"
        result = f"stopped, {status.detail}" if status.kind == "stopped" else status.text
        rows.append(
            [attempt.number, _when(attempt.span()[0]), took, result, kept, redacted(failure.one_line()) if failure else _NONE]
        )
    head = ["attempt", "started", "wall time", "result", "checkpoints saved", "first failure"]
    return _table("Attempts", head, rows, "No attempt has left a folder.")


def _checkpoints_table(run: RunDir, facts: Facts) -> str:
    saved = {step: (attempt.number, at) for attempt in facts.attempts for step, at in attempt.saved()}
    losses = dict(facts.eval_points())
    rows: list[list[object]] = []
    for folder in (f for f in children(run.checkpoints) if f.name.startswith("step-")):
        digits = folder.name.removeprefix("step-")
        if digits.isascii() and digits.isdigit() and len(digits) <= 15:
            step, shown = float(digits), f"{int(digits):,}"
        else:
            step, shown = math.nan, _NONE  # nan equals nothing: no event and no evaluation is taken for this folder's
        number_, at = saved.get(step, (_NONE, None))
        # A link may lead anywhere, to the root of a file system too.
        size = _NONE if folder.is_symlink() else _quantity(size_bytes(folder), 1024, _BINARY)
        rows.append([shown, folder.name, size, _when(at), number_, f"{losses[step]:.4g}" if step in losses else _NONE])
    head = ["step", "folder", "size", "saved", "in attempt", "eval loss"]
    return _table("Checkpoints", head, rows, "There is none in checkpoints/.")


def _run_table(run: RunDir, about: Mapping[str, object]) -> str:
    command = about.get("command")
    # Once more: an earlier version may have written the file.
    words = redacted_words([word(part) or "?" for part in command]) if isinstance(command, list) else None
    versions, commit, dirty = about.get("versions"), word(get(about, "git", "commit")), get(about, "git", "dirty")
    state = {True: ", with uncommitted changes", False: ", clean"}.get(dirty, "") if isinstance(dirty, bool) else ""
    facts: list[tuple[str, str | None]] = [
        ("command", shlex.join(words) if words else word(command)),
        ("script", word(about.get("script"))),
        ("host", word(about.get("host"))),
        *((str(name), word(version)) for name, version in list(versions.items() if isinstance(versions, dict) else ())[:20]),
        ("git", f"{commit}{state}" if commit else None),
        ("launcher", word(about.get("launcher"))),
        ("ranks", word(about.get("ranks"))),
        ("started", _when(number(about.get("started")))),
        ("folder", str(run.path)),
    ]
    return _table("Run", [], [[name, "unknown" if value is None else value] for name, value in facts], "")


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> str:
    """A table of texts; without `head`, the first cell of each row is its heading."""
    if not rows:
        return f'<section><h2>{title}</h2><p class="none">{empty}</p></section>'
    lines = [f"<thead><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr></thead>"] if head else []
    for row in rows[-_ROWS:]:
        cells = [f"<td>{_text(cell, 2000)}</td>" for cell in row]
        if not head:
            cells[0] = f"<th>{_text(row[0], 60)}</th>"
        lines.append(f"<tr>{''.join(cells)}</tr>")
    table = f'<div class="scroll"><table class="{"rows" if head else "facts"}">{"".join(lines)}</table></div>'
    more = f'<p class="none">The last {_ROWS} of {len(rows)}.</p>' if len(rows) > _ROWS else ""
    return f"<section><h2>{title}</h2>{table}{more}</section>"


_MORE = ' <a href="#failure">Traceback</a>'

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{title}</title><style>{style}</style></head><body><main>
"""

_STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfa; --card: #ffffff; --ink: #1c2126; --soft: #59626b; --rule: #dcdfdf;
  --grid: #e9ebea; --axis: #a9b0b4; --train: #1f5fa8; --faint: #97b8de; --dot: #6f9bd0; --eval: #b8500a; --good: #1d7044;
  --bad: #b3261e; --warn: #85600a; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --card: #1d2125; --ink: #e3e6e8; --soft: #9aa4ac; --rule: #30363b;
  --grid: #252a2e; --axis: #58626a; --train: #79b4f2; --faint: #3c6492; --dot: #4f86bf; --eval: #f2a35c; --good: #6cc796;
  --bad: #ff8d84; --warn: #e0b64f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1.5rem 4rem; }
h1 { margin: 0; font-size: 1.625rem; line-height: 1.25; overflow-wrap: anywhere; }
header p { margin: .4rem 0 0; color: var(--soft); overflow-wrap: anywhere; }
h2 { margin: 0 0 .9rem; font-size: 1.0625rem; }
section { margin-top: 2.75rem; }
.status { margin-right: .4em; font-weight: 600; }
a { color: var(--train); }
.status::before { content: ""; display: inline-block; width: .6em; height: .6em; margin-right: .4em; border-radius: 50%;
  background: currentColor; }
.finished { color: var(--good); }
.failed { color: var(--bad); }
.stopped { color: var(--warn); }
.unknown { color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); gap: 1.1rem 1.125rem; margin: 1.75rem 0 0;
  padding: 1.1rem 0; border: solid var(--rule); border-width: 1px 0; }
.figures dt { font-size: .8125rem; color: var(--soft); }
.figures dd { margin: 0; font-size: 1.375rem; line-height: 1.3; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.figures .under { font-size: .8125rem; color: var(--soft); }
.notes { margin: 1.25rem 0 0; padding: .6rem 1rem .6rem 2rem; border-left: 3px solid var(--warn); background: var(--card);
  font-size: .875rem; overflow-wrap: anywhere; }
.none { color: var(--soft); }
.failure { padding: 1rem 1.25rem; border: 1px solid var(--rule); border-left: 4px solid var(--bad); background: var(--card); }
.failure h2 { color: var(--bad); overflow-wrap: anywhere; }
.failure p { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { max-height: 26rem; margin: 0; overflow: auto; font: .8125rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem 1.25rem .4rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
.rows td { white-space: nowrap; }
.rows td:last-child { white-space: normal; min-width: 12rem; overflow-wrap: anywhere; }
.facts th { width: 8rem; }
.facts td { overflow-wrap: anywhere; white-space: pre-wrap; }
"""
