"""What happened when: attempts on a time line, why each ended, the checkpoints, and the causes of lost time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from echelon.common.redact import redacted
from echelon.contracts.run_dir import RunDir
from echelon.observe.amounts import BINARY, duration, quantity
from echelon.observe.facts import Attempt, Facts, children, size_bytes
from echelon.observe.goodput import LOST, Goodput
from echelon.observe.report.text import NONE, safe, stacked_bar, table, when

__all__ = ["attempts", "checkpoints", "failure", "goodput_section", "timeline"]

_MOST = 400  # most marks on the time line
# The colours of a step's parts, where they are the same.
_COLOURS = {"productive": "g", "data": "p0", "startup": "p1", "redone": "p2", "outside": "p3", "ending": "p4", "checkpoint": "p5"}
_COLOURS |= {"evaluation": "p6", "down": "p7", "hang": "h"}


def failure(attempt: Attempt) -> str:
    """Why an attempt failed: the explanation of `echelon explain`, and the error of the rank that failed first."""
    first, explained = attempt.failure(), attempt.explained()
    paragraph = f'<p class="explained">{safe(redacted(explained), 4000)}</p>' if explained else ""
    if first is None:
        heading = "Failure"
        body = paragraph or f"<p>No rank reported why. The output of the ranks is in attempts/{attempt.number:03d}/.</p>"
    else:
        heading = f"Failure on {first.where()}: {first.kind or 'unknown kind'}"
        message = redacted(first.message or "no message")
        repeats = bool(explained) and " ".join(message.split()) in " ".join(redacted(explained).split())
        body = paragraph if repeats else f"{paragraph}<p>{safe(message, 4000)}</p>"
        body += f'<pre tabindex="0">{safe(redacted(first.traceback or "no traceback"), 20_000)}</pre>'
    return f'<section class="failure" id="failure"><h2>{safe(heading, 200)}</h2>{body}</section>'


def timeline(facts: Facts) -> str:
    """The attempts as bars on a time line, with evaluations and checkpoints in them; gaps are lost time."""
    spans = [(attempt, *attempt.span()) for attempt in facts.attempts]
    known = [(a, began, ended) for a, began, ended in spans if began is not None and ended is not None and ended >= began]
    if not known:
        return ""
    low, high = min(began for _, began, _ in known), max(ended for _, _, ended in known)
    if not 0 < high - low < 1e10:
        return ""

    def across(at: float) -> str:
        return f"{100 * (min(max(at, low), high) - low) / (high - low):.3f}%"

    def wide(began: float, ended: float) -> str:
        return f'x="{across(began)}" width="{100 * max(0.0, min(ended, high) - max(began, low)) / (high - low):.3f}%"'

    parts = []
    for attempt, began, ended in known:
        status = attempt.status()
        label = f"attempt {attempt.number}: {status.text}, {duration(ended - began)}"
        parts.append(
            f'<rect class="{status.kind}" {wide(began, ended)} y="9" height="26"><title>{safe(label, 200)}</title></rect>'
        )
        for start, end in attempt.evaluations()[:_MOST]:
            parts.append(f'<rect class="evaluation" {wide(start, end)} y="9" height="26"><title>evaluation</title></rect>')
    for step, at in [saved for attempt in facts.attempts for saved in attempt.saved()][-_MOST:]:
        if at is not None and low <= at <= high:
            shown = "unknown" if step is None else f"{step:,.12g}"
            parts.append(
                f'<line class="saved" x1="{across(at)}" x2="{across(at)}" y1="3" y2="41"><title>update {shown}</title></line>'
            )
    down = (high - low) - _covered([(began, ended) for _, began, ended in known])
    lost = f", {duration(down)} of it between attempts" if down > 1 else ""
    words = f"{len(known)} attempt{'s' if len(known) > 1 else ''} in {duration(high - low)}{lost}"
    keys = '<span class="legend"><span class="key saved">checkpoint</span><span class="key evaluation">evaluation</span></span>'
    return (
        f'<section><h2>On the clock</h2><svg class="timeline" role="img" aria-label="{safe(words)}">{"".join(parts)}</svg>'
        f'<p class="ends"><span>{when(low)}</span><span>{safe(words)}</span><span>{when(high)}</span></p>{keys}</section>'
    )


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    total, until = 0.0, -math.inf
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def attempts(all_attempts: Sequence[Attempt]) -> str:
    rows: list[list[object]] = []
    for attempt in all_attempts:
        status, first, saved = attempt.status(), attempt.failure(), attempt.saved()
        took = duration(attempt.seconds()) + (", to its last event" if attempt.exit is None and attempt.events else "")
        step = saved[-1][0] if saved else None
        kept = f"{len(saved)}, last at update {'unknown' if step is None else f'{step:,.12g}'}" if saved else "none"
        result = f"stopped, {status.detail}" if status.kind == "stopped" else status.text
        why = attempt.explained() or (first.one_line() if first else NONE)
        rows.append([attempt.number, when(attempt.span()[0]), took, result, kept, redacted(why)])
    head = ["attempt", "started", "wall time", "result", "checkpoints saved", "why it ended"]
    return table("Attempts", head, rows, "No attempt has left a folder.")


def checkpoints(run: RunDir, facts: Facts) -> str:
    saved = {step: (attempt.number, at) for attempt in facts.attempts for step, at in attempt.saved()}
    losses = dict(facts.points("eval_loss"))
    rows: list[list[object]] = []
    for folder in (f for f in children(run.checkpoints) if f.name.startswith("step-")):
        digits = folder.name.removeprefix("step-")
        if digits.isascii() and digits.isdigit() and len(digits) <= 15:
            step, shown = float(digits), f"{int(digits):,}"
        else:
            step, shown = math.nan, NONE  # nan equals nothing, so no event or evaluation matches this folder
        number_, at = saved.get(step, (NONE, None))
        # A link may lead anywhere, even to the root of a file system.
        size = NONE if folder.is_symlink() else quantity(size_bytes(folder), 1024, BINARY)
        rows.append([shown, folder.name, size, when(at), number_, f"{losses[step]:.4g}" if step in losses else NONE])
    head = ["step", "folder", "size", "saved", "in attempt", "eval loss"]
    return table("Checkpoints", head, rows, "There is none in checkpoints/.")


def goodput_section(measured: Goodput | None) -> str:
    """The goodput section; empty for a run without times."""
    if measured is None or measured.wall_s <= 0:
        return ""
    parts = [
        ("productive", measured.productive_s, "steps that count"),
        *((each, s, LOST[each]) for each, s in measured.lost.items()),
    ]
    bar, rows = [], []
    for name, seconds, label in parts:
        kind, percent, took = _COLOURS.get(name, "p7"), 100 * seconds / measured.wall_s, duration(seconds)
        bar.append((kind, percent, f"{name}: {took}, {percent:.1f}%"))
        key = f'<th scope="row"><span class="key {kind}">{name}</span></th>'
        rows.append(f"<tr>{key}<td>{took}</td><td>{percent:.1f}%</td><td>{safe(label)}</td></tr>")
    if measured.wait_s > 0:
        share, why = f"{100 * measured.wait_s / measured.wall_s:.1f}%", "for other ranks: the price of training in parallel"
        rows.append(f"<tr><th>of these waiting</th><td>{duration(measured.wait_s)}</td><td>{share}</td><td>{why}</td></tr>")
    made = f'<div class="scroll" tabindex="0"><table class="rows">{"".join(rows)}</table></div>'
    return f'<section class="goodput"><h2>Goodput: {measured.share:.0%}</h2>{stacked_bar(bar, str(measured))}{made}</section>'
