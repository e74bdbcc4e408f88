"""A run on the page: its folder, its facts, and its label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.contracts.run_dir import RunDir
from echelon.observe.attempt_times import AttemptTimes, times_of
from echelon.observe.facts import Facts, read
from echelon.observe.goodput import Goodput, goodput
from echelon.observe.report.text import clean

__all__ = ["RunOnPage", "runs_on_page"]


@dataclass(frozen=True)
class RunOnPage:
    """One of the runs on a page.

    Args:
        number: its index among them, which selects its colour.
        label: its name; if several runs share the name, its folder.
        times: the ranks' times, by attempt.
        goodput: None for a run without times.
    """

    number: int
    run: RunDir
    facts: Facts
    label: str
    times: Sequence[AttemptTimes] = ()
    goodput: Goodput | None = None


def runs_on_page(runs: Sequence[RunDir]) -> list[RunOnPage]:
    """Read the runs' folders."""
    facts = [read(run) for run in runs]
    names = [clean(each.name, 60) for each in facts]
    folders = [clean(run.path.absolute(), 60) for run in runs]
    labels = [folder if names.count(name) > 1 else name for name, folder in zip(names, folders, strict=True)]
    times = [times_of(run) for run in runs]
    goodputs = [_goodput(run, each) for run, each in zip(runs, times, strict=True)]
    return [RunOnPage(n, *each) for n, each in enumerate(zip(runs, facts, labels, times, goodputs, strict=True))]


def _goodput(run: RunDir, times: Sequence[AttemptTimes]) -> Goodput | None:
    measured = goodput(run, times)
    return (
        measured if measured is not None and measured.productive_s > 0 else None
    )  # without times, steps and waits cannot be told apart
