"""Rows of `echelon doctor`: what was found, whether it is well, and the remedy if it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from echelon.common.terminal import rank_ranges
from echelon.doctor.hosts import hosts
from echelon.doctor.reports import Checkup, RankReport
from echelon.doctor.row import Row, State
from echelon.doctor.together import together

__all__ = ["judged"]


def judged(checkup: Checkup) -> list[Row]:
    """All rows, in the order of a search for faults: which ranks answer, what they run, their hosts, how they communicate."""
    rows = [_answers(checkup), *_broken(checkup), *_versions(checkup)]
    return [*rows, *hosts(checkup), *together(checkup)]


def _answers(checkup: Checkup) -> Row:
    hosts = len({report.host for report in checkup.ranks.values()})
    there = f"{len(checkup.ranks)} of {checkup.size} ranks answer, on {hosts} host{'s' if hosts != 1 else ''}"
    remedy = "Look at the node with `scontrol show node NAME`, and exclude it (--exclude=NAME) or have it repaired."
    if checkup.silent:
        why = "; ".join(f"{node}: {text}" for node, text in list(checkup.silent.items())[:8])
        return Row("ranks", "fail", f"{there}. Without an answer: {why}", remedy)
    missing = [rank for rank in range(checkup.size) if rank not in checkup.ranks]
    ended = f". {checkup.ended}" if checkup.ended else ""
    if missing:
        who = f"; {rank_ranges(missing)} did not"
        return Row(
            "ranks", "fail", f"{there}{who}{ended}", "Run `python -c 'import torch, echelon'` there, and see what it prints."
        )
    if ended:
        return Row("ranks", "fail", f"{there}{ended}", "Look at the line 'unfinished', or give more time: --time-limit 10m.")
    return Row("ranks", "ok", there)


_OF_PART = {
    "torch": "torch cannot be imported there: install it again, in an environment of its own.",
    "joined": "The ranks cannot reach one another: look at the rows ranks, names and interface, and at firewalls.",
    "script": "Copy the script there, or start from a folder that all hosts see.",
    "resolution": "Give the host an entry in /etc/hosts or the name server.",
}


def _broken(checkup: Checkup) -> Iterator[Row]:
    """Parts that raised, each error once; and ranks that hang in a part."""
    broken: dict[tuple[str, str], list[int]] = {}
    for report in checkup.in_order:
        for part, error in report.errors.items():
            broken.setdefault((part, error), []).append(report.rank)
    for (part, error), ranks in list(broken.items())[:12]:
        yield Row(part, "fail", f"{checkup.who(ranks)}: {error}", _OF_PART.get(part, "Fix what the error names there."))
    hang: dict[str, list[int]] = {}
    for report in checkup.in_order:
        if "end" not in report.values and report.values:
            doing = report.values.get("doing")
            hang.setdefault(doing if isinstance(doing, str) else "the beginning", []).append(report.rank)
    for part, ranks in hang.items():
        text = f"{checkup.who(ranks)} did not get beyond {part!r}"
        yield Row("unfinished", "fail", text, "Look there with `py-spy dump`, or at `dmesg` if the process has ended.")


# --- what they run


def _same(
    checkup: Checkup, name: str, value_of: Callable[[RankReport], object], remedy: str, state: State = "fail"
) -> Iterator[Row]:
    """A row about a value that must be the same on all ranks. No row if no rank has it."""
    having: dict[str, list[int]] = {}
    for report in checkup.in_order:
        value = value_of(report)
        if value not in (None, ""):
            having.setdefault(str(value), []).append(report.rank)
    if not having:
        return
    most = max(having, key=lambda value: len(having[value]))
    if len(having) == 1:
        yield Row(name, "ok", most)
        return
    other = "; ".join(f"{checkup.who(ranks)}: {value}" for value, ranks in list(having.items())[:8] if value != most)
    yield Row(name, state, f"{most}, but {other}", remedy)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _versions(checkup: Checkup) -> Iterator[Row]:
    install = "Install the same version everywhere, or start all ranks from one environment in a shared folder."
    for name, part in (("python", "versions"), ("torch", "torch"), ("echelon", "versions"), ("echelon's code", "versions")):
        yield from _same(checkup, name, lambda report, name=name, part=part: report.texts(part).get(name), install)  # type: ignore[misc]
    yield from _same(
        checkup, "script", lambda report: _text(report.values.get("script")), "Copy it there again, or use a shared folder."
    )
    for name, part in (("NCCL", "torch"), ("CUDA of torch", "torch")):
        yield from _same(checkup, name, lambda report, name=name, part=part: report.texts(part).get(name), install)  # type: ignore[misc]
    driver = "One version of NCCL runs on several drivers, at the speed of the oldest: install the same driver on all hosts."
    yield from _same(checkup, "driver", lambda report: report.texts("versions").get("driver"), driver, "warn")
