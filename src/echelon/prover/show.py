"""The table of a proof as text, and the page that stays in the run folder."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from echelon.prover.causes import CAUSES
from echelon.prover.matrix import YOURS
from echelon.prover.proof import NOTHING_COMPARED, Proof, Result

__all__ = ["HEADER", "blocks", "conclusion", "details", "line", "page", "summary"]

_COLUMNS = (
    ("layout", 37),  # "tp, sequence parallel, accumulation 2"
    ("ranks", 5),
    ("loss", 9),
    ("gradient", 9),
    ("parameters", 10),
    ("verdict", 0),
)
_MESSAGE_LINES = 12
_MOST_NAMES = 8  # of rows with the same details
HEADER = "  ".join(f"{name:>{width}}" if i else f"{name:<{width}}" for i, (name, width) in enumerate(_COLUMNS))


def line(result: Result) -> str:
    """One row of the table."""
    return "  ".join(
        f"{cell:>{width}}" if i else f"{cell:<{width}}"
        for i, (cell, (_, width)) in enumerate(zip(_cells(result), _COLUMNS, strict=True))
    )


def _cells(r: Result) -> list[str]:
    return [
        _name(r),
        str(r.ranks),
        _small(r.loss),
        _small(r.gradient),
        _small(r.parameter),
        f"{r.verdict}: {_what_differs(r)}" if r.verdict == "DIFFERS" else r.verdict,
    ]


def _what_differs(r: Result) -> str:
    """What differs. The numbers of a row may all be right, for example if ranks have the same samples."""
    if r.first is None:
        return r.causes[0][0] if r.causes else r.message.partition("; ")[0]
    return f"update {r.first.update}, {r.first.tensor}"


def _small(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def _name(result: Result) -> str:
    return f"{result.label} ({YOURS})" if result.yours and result.label != YOURS else result.label


def details(result: Result) -> list[str]:
    """Lines about a row beyond its numbers."""
    lines = []
    for cause, seen in result.causes:
        lines += [f"likely cause: {cause}", f"  seen: {seen}", f"  {CAUSES[cause]}"]
    if result.first is not None:
        f = result.first
        of = " of float64" if result.precision == "float64" else ""
        lines.append(
            f"first difference: update {f.update}, {f.phase}, {f.tensor}: "
            f"{f.relative:.1e} relative, rounding{of} allows {f.tolerance:.1e}"
        )
    if result.verdict == "DIFFERS" and result.first is not None and not result.causes:
        lines.append("no cause of the catalogue explains it")
    lines += [f"note: {note}" for note in result.notes]
    if result.message:
        lines += _of_the_script(result.message.strip().partition("\n\nTraceback (most recent call last):")[0].splitlines())
    return lines


def _of_the_script(lines: list[str]) -> list[str]:
    """The lines of a failure, or of the stacks of ranks that hung, with the script's own frames only; of many, both ends."""
    libraries = ("site-packages", "/lib/python", str(Path(__file__).parents[1]))
    shown: list[str] = []
    ours = False
    for text in lines:
        if text.lstrip().startswith('File "'):
            ours = any(part in text for part in libraries)
        elif not text.startswith("      "):  # source lines belong to the frame above
            ours = False
        if text.strip() and not ours and "thread 0x" not in text and "more frames in libraries" not in text:
            shown.append(text)
    return shown if len(shown) <= _MESSAGE_LINES else [*shown[: _MESSAGE_LINES // 2], "...", *shown[-_MESSAGE_LINES // 2 :]]


def blocks(results: list[Result]) -> list[tuple[str, list[str]]]:
    """The details of rows, once for all rows with the same: the names of these rows, and the details of the first."""
    groups: dict[Any, list[Result]] = {}
    for result in results:
        if details(result):
            last_line = re.sub(r"[0-9]+", "", (result.message.strip().splitlines() or [""])[-1])  # numbers differ by rank
            cause = tuple(cause for cause, _ in result.causes) or last_line
            groups.setdefault((result.verdict, cause, tuple(result.notes)), []).append(result)
    return [(_rows(group, len(results)), details(group[0])) for group in groups.values()]


def _rows(group: list[Result], count: int) -> str:
    ranks: dict[str, list[str]] = {}
    for result in group:
        ranks.setdefault(_name(result), []).append(str(result.ranks))
    named = [f"{name} on {' and '.join(of)}" for name, of in ranks.items()]
    if len(group) == count > 2:
        return f"all {count} rows ({group[0].verdict}); of {named[0]}:"
    more = f"; {len(named) - _MOST_NAMES} more" if len(named) > _MOST_NAMES else ""
    return f"{'; '.join(named[:_MOST_NAMES])}{more} ({group[0].verdict}):"


def summary(proof: Proof) -> list[str]:
    """Lines below the table: notes, elements without a right value, and the conclusion."""
    lines = list(proof.notes)
    noise: dict[str, int] = {}
    for result in [r for r in proof.results if r.agrees]:
        for name, count in result.undetermined.items():
            noise[name] = max(noise.get(name, 0), count)
    if noise:
        name = next(iter(noise))
        lines.append(
            f"{sum(noise.values())} elements of {len(noise)} parameters (such as {name}) have a true gradient of zero, as "
            f"far as {proof.dtype} can tell: rounding noise moves them in every implementation, and they are not compared. "
            "Run with --float64 to see that nothing else does."
        )
    return [*lines, conclusion(proof)]


def conclusion(proof: Proof) -> str:
    rows, code = proof.results, proof.exit_code
    early = "Interrupted. " if proof.interrupted else ""
    count = f"Of {len(rows)} row{'s' if len(rows) > 1 else ''} {_counts(rows)}."
    if code == NOTHING_COMPARED:
        refused = all(r.verdict == "not possible" for r in rows)
        why = (
            " before it could be" if proof.interrupted else ": " + ("no row is possible here" if refused else count.lower()[:-1])
        )
        return f"{early}Nothing was compared{why if rows else ''}."
    yours = [r for r in rows if r.yours]
    if code == 0:
        alike = "The one row trains" if len(rows) == 1 else f"All {len(rows)} rows train"
        if all(r.is_equal for r in rows):
            narrow = sorted({r.precision for r in rows} - {"", "float32"}) if proof.dtype == "float32" else []
            return f"{alike} as one process in plain PyTorch does, to the rounding of {' or '.join([proof.dtype, *narrow])}."
    return " ".join(filter(None, (early.strip(), _of_yours(yours), count)))


def _of_yours(yours: list[Result]) -> str:
    if not yours:
        return ""
    name = f"The script's own configuration ({yours[0].label})"
    if any(r.is_bad for r in yours):
        differs = any(r.verdict == "DIFFERS" for r in yours)
        return f"{name} {'does not train as one process in plain PyTorch does' if differs else 'fails'}."
    if all(r.agrees for r in yours) and any(r.is_equal for r in yours):
        return f"{name} trains as one process in plain PyTorch does."
    return f"{name} was {'compared in part' if any(r.is_compared for r in yours) else 'not compared'}."


def _counts(rows: list[Result]) -> str:
    words = {  # of one, of several
        ("agrees", "agree"): [r.is_equal for r in rows],
        ("was compared in part", "were compared in part"): [r.is_partly_equal for r in rows],
        ("differs", "differ"): [r.verdict == "DIFFERS" for r in rows],
        ("is undecided", "are undecided"): [r.verdict == "undecided" for r in rows],
        ("failed", "failed"): [r.verdict == "failed" for r in rows],
        ("is not possible here", "are not possible here"): [r.verdict == "not possible" for r in rows],
    }
    return ", ".join(f"{sum(of)} {forms[sum(of) > 1]}" for forms, of in words.items() if any(of))


def page(proof: Proof, title: str) -> str:
    """What the terminal shows, as one HTML page that works offline."""
    text = [HEADER, *map(line, proof.results)]
    text += [
        each for named, lines_of_block in blocks(proof.results) for each in ("", named, *(f"    {one}" for one in lines_of_block))
    ]
    return _PAGE.format(title=escape(title), text=escape("\n".join([*text, "", *summary(proof)])))


_PAGE = """<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>{title}</title>
<style>:root {{ color-scheme: light dark }} pre {{ white-space: pre-wrap; margin: 2rem; font-size: 14px }}</style>
<pre>{text}</pre>
</html>
"""
