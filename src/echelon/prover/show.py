"""The table of a proof as text, and the page that stays in the run folder."""

from __future__ import annotations

from html import escape
from pathlib import Path

from echelon.prover.causes import CAUSES
from echelon.prover.proof import Proof, Result

__all__ = ["HEADER", "details", "line", "page", "summary"]

_COLUMNS = (
    ("strategy", 37),  # "tp, sequence parallel, accumulation 2"
    ("ranks", 5),
    ("loss", 9),
    ("gradient", 9),
    ("parameters", 10),
    ("step", 9),
    ("peak", 9),
    ("verdict", 12),
)
_MESSAGE_LINES = 12
HEADER = "  ".join(f"{name:>{width}}" if i else f"{name:<{width}}" for i, (name, width) in enumerate(_COLUMNS))


def line(result: Result) -> str:
    """One row of the table."""
    return "  ".join(
        f"{cell:>{width}}" if i else f"{cell:<{width}}"
        for i, (cell, (_, width)) in enumerate(zip(_cells(result), _COLUMNS, strict=True))
    )


def _cells(r: Result) -> list[str]:
    return [
        r.label,
        str(r.ranks),
        _small(r.loss),
        _small(r.gradient),
        _small(r.parameter),
        f"{r.step_s * 1e3:.1f} ms" if r.step_s is not None else "",
        f"{r.peak_bytes / 2**20:.0f} MiB" if r.peak_bytes is not None else "",
        r.verdict,
    ]


def _small(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def details(result: Result) -> list[str]:
    """What there is to say about a row beyond its numbers."""
    lines = []
    if result.first is not None:
        f = result.first
        lines.append(
            f"first difference: update {f.update}, {f.phase}, {f.tensor}: "
            f"{f.relative:.1e} relative, rounding allows {f.tolerance:.1e}"
        )
    for cause, seen in result.causes:
        lines += [f"likely cause: {cause}", f"  seen: {seen}", f"  {CAUSES[cause]}"]
    if result.verdict == "DIFFERS" and result.first is not None and not result.causes:
        lines.append("no cause of the catalogue explains it")
    lines += [f"note: {note}" for note in result.notes]
    if result.message:
        lines += _without_libraries(result.message.strip().splitlines())[:_MESSAGE_LINES]
    return lines


def _without_libraries(lines: list[str]) -> list[str]:
    """Of the stacks of ranks that did not end: only frames of the script's own."""
    if not any(line.startswith("--- rank") for line in lines):
        return lines
    libraries = ("site-packages", "/lib/python", str(Path(__file__).parents[1]))
    return [line for line in lines if line and "thread 0x" not in line and not any(part in line for part in libraries)]


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
            "--float64 shows that nothing else does."
        )
    bad = [r for r in proof.results if not (r.agrees or r.is_partly_equal)]
    partly = sum(r.is_partly_equal for r in proof.results)
    refused = sum(r.verdict == "not possible" for r in proof.results)
    compared = sum(r.is_equal for r in proof.results)
    if bad:
        lines.append(f"{len(bad)} of {len(proof.results)} rows do not train as one process does.")
    elif partly:
        agree = (
            f"{compared} {'row agrees' if compared == 1 else 'rows agree'} with one process in plain PyTorch, "
            if compared
            else ""
        )
        lines.append(f"{agree}{partly} {'was' if partly == 1 else 'were'} compared in part: what was not tested stands there.")
    elif not proof.holds:
        lines.append(f"Nothing is proved: {refused} of {len(proof.results)} rows are not possible here.")
    else:
        few = f" {refused} {'is' if refused == 1 else 'are'} not possible here." if refused else ""
        rows = "The one row trains" if compared == 1 else f"All {compared} rows train"
        lines.append(f"{rows} as one process in plain PyTorch does, to the rounding of {proof.dtype}.{few}")
    return lines


def page(proof: Proof, title: str) -> str:
    """The proof as one HTML page that works offline."""
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in _COLUMNS)
    body = []
    for result in proof.results:
        kind = "good" if result.agrees else "part" if result.is_partly_equal else "bad"
        body.append(f"<tr class={kind}>" + "".join(f"<td>{escape(c)}</td>" for c in _cells(result)) + "</tr>")
        text = details(result)
        if text:
            body.append(f"<tr class=detail><td colspan={len(_COLUMNS)}><pre>{escape(chr(10).join(text))}</pre></td></tr>")
    below = "".join(f"<p>{escape(text)}</p>" for text in summary(proof))
    return _PAGE.format(title=escape(title), head=head, body="\n".join(body), below=below)


_PAGE = """<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }}
body {{ max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
div {{ overflow-x: auto }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }}
th, td {{ text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #8884 }}
th:first-child, td:first-child {{ text-align: left }}
tr.good td:last-child {{ color: light-dark(#17692f, #7ddb98) }}
tr.bad td:last-child {{ color: light-dark(#b3261e, #ff9a90); font-weight: 600 }}
tr.part td:last-child {{ color: light-dark(#7a5200, #f0c060); font-weight: 600 }}
tr.detail td {{ text-align: left }}
pre {{ margin: 0; white-space: pre-wrap }}
</style>
<h1>{title}</h1>
<div><table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></div>
{below}
</html>
"""
