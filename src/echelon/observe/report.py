"""The report: one run folder as one HTML page that works offline, in an e-mail or in an archive; or several runs, compared.

Reads nothing but the folders and changes nothing in them except `report.html`. What is missing or cut off is said on the page,
never an error: a report is wanted most for the run that went wrong. All text from files counts as hostile, and is escaped in
`page.text`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echelon.common.errors import RunFolderError
from echelon.common.files import write_whole
from echelon.common.redact import redacted
from echelon.contracts.run_dir import RunDir
from echelon.observe.goodput import LOST, Goodput
from echelon.observe.page import history
from echelon.observe.page.about import differences, run_table
from echelon.observe.page.charts import charts
from echelon.observe.page.figures import compared, figures
from echelon.observe.page.ranks import ranks
from echelon.observe.page.script import SCRIPT
from echelon.observe.page.shown import Shown, shown_of
from echelon.observe.page.style import STYLE
from echelon.observe.page.text import duration, safe

__all__ = ["compare", "render", "write"]

MOST_RUNS = 24


def write(run: RunDir) -> Path:
    """Write the page to `run.report` for this user alone, so that a reader sees the old or the new page, never half of one.

    Returns:
        The path of the page.
    Raises:
        UsageError: the run's folder does not exist.
    """
    _check(run)
    write_whole(run.report, render(run))
    return run.report


def compare(runs: Sequence[RunDir], to: Path) -> Path:
    """Write one page about several runs.

    Raises:
        UsageError: a folder does not exist, or there are more runs than can be told apart.
    """
    for run in runs:
        _check(run)
    if len(runs) > MOST_RUNS:
        raise RunFolderError(f"a report must compare at most {MOST_RUNS} runs, got {len(runs)}. Give fewer of them.")
    write_whole(to, render(*runs))
    return to


def _check(run: RunDir) -> None:
    if not run.path.is_dir():
        raise RunFolderError(f"there is no run folder at {run.path}. Give the path of a folder that a run has written.")


def render(*runs: RunDir) -> str:
    """The page as text. The same folders give the same text, whenever it is rendered."""
    shown = shown_of(runs)
    parts = _one(shown[0]) if len(shown) == 1 else _several(shown)
    title = f"{shown[0].facts.name}: {shown[0].facts.status().text}" if len(shown) == 1 else f"{len(shown)} runs compared"
    page = [_HEAD.format(title=safe(title, 300), style=STYLE), *parts, f"</main><script>{SCRIPT}</script></body></html>\n"]
    # JSON may hold half a surrogate pair, which no file can.
    return "".join(page).encode("utf-8", "replace").decode("utf-8")


def _one(shown: Shown) -> list[str]:
    run, facts = shown.run, shown.facts
    status = facts.status()
    more = ' <a href="#failure">Traceback</a>' if status.kind == "failed" else ""
    return [
        f'<header><h1>{safe(facts.name, 200)}</h1><p><span class="status {status.kind}">{safe(status.text, 100)}</span> ',
        f"{safe(redacted(status.detail), 300)}{more}</p></header>",
        figures(shown),
        _notes(facts.notes),
        charts([shown]),
        history.failure(facts.attempts[-1]) if status.kind == "failed" else "",
        ranks(shown.times),
        productive(shown.goodput),
        history.timeline(facts),
        history.attempts(facts.attempts),
        history.checkpoints(run, facts),
        run_table(run, facts.about),
    ]


def _several(runs: Sequence[Shown]) -> list[str]:
    parts = [
        f"<header><h1>{len(runs)} runs compared</h1><p>{safe(', '.join(each.label for each in runs), 1000)}</p></header>",
        compared(runs),
        charts(runs),
        differences(runs),
    ]
    for each in runs:
        facts, status = each.facts, each.facts.status()
        parts += [
            f'<section class="one"><h2 class="run r{each.number % 8}">{safe(each.label, 60)}</h2>'
            f'<p><span class="status {status.kind}">{safe(status.text, 100)}</span> {safe(redacted(status.detail), 300)}</p>',
            _notes(facts.notes),
            ranks(each.times),
            productive(each.goodput),
            history.timeline(facts),
            history.attempts(facts.attempts),
            "</section>",
        ]
    return parts


def _notes(notes: Sequence[str]) -> str:
    shown = [*notes[:20], *([f"… and {len(notes) - 20} more."] if len(notes) > 20 else [])]
    return f'<ul class="notes">{"".join(f"<li>{safe(note)}</li>" for note in shown)}</ul>' if notes else ""


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{title}</title><style>{style}</style></head><body><main>
"""


# Goodput on the page: how much of the wall time went into steps that count, and what the rest was lost to.


# As the parts of a step where they are the same.
_COLOURS = {"productive": "g", "data": "p0", "startup": "p1", "redone": "p2", "outside": "p3", "ending": "p4", "checkpoint": "p5"}
_COLOURS |= {"evaluation": "p6", "down": "p7", "hang": "h"}


def productive(found: Goodput | None) -> str:
    """The section; empty for a run that left no times."""
    if found is None or found.wall_s <= 0:
        return ""
    parts = [
        ("productive", found.productive_s, "steps that count"),
        *((cause, s, LOST[cause]) for cause, s in found.lost.items()),
    ]
    x, bars, keys = 0.0, [], []
    for name, seconds, told in parts:
        width = 100 * seconds / found.wall_s
        kind = _COLOURS.get(name, "p7")
        words = f"{name}: {duration(seconds)}, {width:.1f}%"
        bars.append(f'<rect class="{kind}" x="{x:.2f}%" width="{width:.2f}%" height="100%"><title>{words}</title></rect>')
        keys.append(f'<tr><th scope="row"><span class="key {kind}">{name}</span></th><td>{duration(seconds)}</td>')
        keys.append(f"<td>{width:.1f}%</td><td>{safe(told)}</td></tr>")
        x += width
    if found.wait_s > 0:
        keys.append(f"<tr><th>of these waiting</th><td>{duration(found.wait_s)}</td>")
        keys.append(
            f"<td>{100 * found.wait_s / found.wall_s:.1f}%</td><td>for other ranks: the price of training in parallel</td></tr>"
        )
    bar = f'<svg class="bar" role="img" aria-label="{safe(str(found), 1000)}">{"".join(bars)}</svg>'
    made = f'<div class="scroll" tabindex="0"><table class="rows">{"".join(keys)}</table></div>'
    return f'<section class="goodput"><h2>Goodput: {found.share:.0%}</h2>{bar}{made}</section>'
