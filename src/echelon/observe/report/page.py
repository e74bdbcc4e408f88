"""The report: one run folder, or several to compare, as one HTML page that works offline, in an e-mail or in an archive.

Reads only the folders, and changes nothing in them except `report.html`. Missing or truncated files are noted on the page and
never raise, since a report is needed most for a run that failed. All text from files is untrusted, and is escaped in `text`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from string import Template

from echelon.common.errors import RunFolderError
from echelon.common.files import write_whole
from echelon.common.redact import redacted
from echelon.contracts.run_dir import RunDir
from echelon.observe.report import history
from echelon.observe.report.about import differences, run_table
from echelon.observe.report.charts import charts
from echelon.observe.report.figures import compared, figures, planned_and_measured
from echelon.observe.report.ranks import ranks
from echelon.observe.report.runs import RunOnPage, runs_on_page
from echelon.observe.report.text import safe

__all__ = ["compare", "render", "write"]

MOST_RUNS = 24


def write(run: RunDir) -> Path:
    """Write the page to `run.report` for this user alone. A reader sees the old or the new page, never half of it.

    Returns:
        The path of the page.
    Raises:
        UsageError: the run's folder does not exist.
    """
    _check(run)
    write_whole(run.report, render(run))
    return run.report


def compare(runs: Sequence[RunDir], to: Path) -> Path:
    """Write one page that compares several runs.

    Raises:
        UsageError: a folder does not exist, or there are too many runs to tell apart.
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
    """The page as text. The same folders always give the same text."""
    shown = runs_on_page(runs)
    parts = _one(shown[0]) if len(shown) == 1 else _several(shown)
    title = f"{shown[0].facts.name}: {shown[0].facts.status().text}" if len(shown) == 1 else f"{len(shown)} runs compared"
    style = _file("uplot/uPlot.min.css") + _file("page.css")
    script = f"/*!\n{_file('uplot/LICENSE')}\n*/\n{_file('uplot/uPlot.iife.min.js')}{_file('page.js')}"
    text = Template(_file("template.html")).substitute(
        title=safe(title, 300),
        body="".join(parts),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )
    # JSON may hold a lone surrogate, which cannot be encoded.
    return text.encode("utf-8", "replace").decode("utf-8")


def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """A hash in the form of a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _one(shown: RunOnPage) -> list[str]:
    run, facts = shown.run, shown.facts
    status = facts.status()
    more = ' <a href="#failure">Traceback</a>' if status.kind == "failed" else ""
    return [
        f'<header><h1>{safe(facts.name, 200)}</h1><p><span class="status {status.kind}">{safe(status.text, 100)}</span> ',
        f"{safe(redacted(status.detail), 300)}{more}</p></header>",
        figures(shown),
        planned_and_measured(facts),
        _notes(facts.notes),
        charts([shown]),
        history.failure(facts.attempts[-1]) if status.kind == "failed" else "",
        ranks(shown.times),
        history.goodput_section(shown.goodput),
        history.timeline(facts),
        history.attempts(facts.attempts),
        history.checkpoints(run, facts),
        run_table(run, facts.about),
    ]


def _several(runs: Sequence[RunOnPage]) -> list[str]:
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
            history.goodput_section(each.goodput),
            history.timeline(facts),
            history.attempts(facts.attempts),
            "</section>",
        ]
    return parts


def _notes(notes: Sequence[str]) -> str:
    shown = [*notes[:20], *([f"… and {len(notes) - 20} more."] if len(notes) > 20 else [])]
    return f'<ul class="notes">{"".join(f"<li>{safe(note)}</li>" for note in shown)}</ul>' if notes else ""
