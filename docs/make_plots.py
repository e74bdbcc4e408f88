"""Draw the plots of the site from the tables of BENCHMARKS.md: `python docs/make_plots.py` writes docs/plots/*.svg.

No number is written here: each is read from the table under its heading, and a table that has changed its form is an error.
tests/docs/test_site.py draws them again and compares, so a plot cannot fall behind its table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLOTS = ROOT / "docs/plots"

WIDTH, LABEL, BAR, GAP, ROW_GAP = 640, 178, 20, 4, 12


class Bar(NamedTuple):
    value: float
    text: str
    ours: bool


class Row(NamedTuple):
    label: str
    bars: Sequence[Bar]


def table(heading: str, nth: int = 0) -> list[list[str]]:
    """The cells of the nth table below a heading of BENCHMARKS.md, without bold, head first."""
    text = (ROOT / "BENCHMARKS.md").read_text()
    _, found, rest = text.partition(f"\n## {heading}")
    if not found:
        raise ValueError(f"BENCHMARKS.md must have a heading that begins with {heading!r}")
    section = rest.partition("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    lines = [line for line in tables[nth].splitlines() if not re.match(r"\|[-|]+$", line)]
    return [[cell.strip().replace("**", "") for cell in line.strip("|").split("|")] for line in lines]


def number(cell: str) -> float:
    """The first number of a cell."""
    found = re.search(r"-?[\d,]*\.?\d+", cell)
    if found is None:
        raise ValueError(f"a cell must hold a number, got {cell!r}")
    return float(found[0].replace(",", ""))


def row_of(rows: list[list[str]], first: str) -> list[str]:
    found = [row for row in rows if row[0].startswith(first)]
    if len(found) != 1:
        raise ValueError(f"exactly one row must begin with {first!r}, got {len(found)}")
    return found[0]


def launch() -> str:
    rows = []
    for row in table("Launch and recovery")[1:]:
        ours, theirs = number(row[1]), number(row[2])
        rows.append(Row(row[0], [Bar(ours, f"echelon {ours:g} s", True), Bar(theirs, f"torchrun {theirs:g} s", False)]))
    return draw("Seconds to the first all-reduce, and from kill -9 of a rank to the next step", rows)


def overhead() -> str:
    rows = table("Loop overhead", 1)
    names = {
        "echelon": "echelon",
        "Fabric": "Fabric",
        "Accelerate": "Accelerate",
        "TorchTNT": "TorchTNT",
        "Lightning": "Lightning",
    }
    found = [next(row for row in rows if row[0] == name) for name in names]
    bars = [Row(row[0], [Bar(number(row[3]), f"{number(row[3]):g} µs", row[0] == "echelon")]) for row in found]
    return draw("Microseconds a step beyond a bare loop, progress and metrics on", bars)


def memory() -> str:
    rows = table("Strategies", 1)
    wanted = {"DDP, torch's defaults": "DDP of torch", "zero1": "zero1", "zero2": "zero2", "zero3, fsdp": "zero3, fsdp"}
    bars = []
    for first, label in wanted.items():
        row = next(row for row in rows if row[0] == first)
        ours = label != "DDP of torch"
        two, four = number(row[1]), number(row[4])
        bars.append(Row(label, [Bar(two, f"2 ranks: {two:g} MiB", ours), Bar(four, f"4 ranks: {four:g} MiB", ours)]))
    return draw("Peak memory of a rank, 25.2 M parameters with AdamW", bars)


def checkpoints() -> str:
    row = row_of(table("Checkpoints"), "synchronous save")
    bars = []
    for label, cell in zip(("ddp", "fsdp"), row[1:3], strict=True):
        ours, theirs = (float(each) for each in re.findall(r"([\d.]+) s", cell))
        bars.append(Row(label, [Bar(ours, f"echelon {ours:g} s", True), Bar(theirs, f"torch's DCP {theirs:g} s", False)]))
    return draw("Seconds of a synchronous save of 512 MB, two ranks", bars)


def help_text() -> str:
    rows = table("Imports and help")
    found = [row_of(rows, name) for name in ("echelon --help", "torchrun --help", "accelerate --help")]
    bars = [Row(row[0], [Bar(number(row[1]), f"{number(row[1]):.0f} ms", row[0].startswith("echelon"))]) for row in found]
    return draw("Milliseconds until the help text is there", bars)


def draw(title: str, rows: Sequence[Row]) -> str:
    """Horizontal bars. Colours come from the page (docs/assets/site.css), and have values of their own beside it."""
    top = max(bar.value for row in rows for bar in row.bars)
    scale = (WIDTH - LABEL - 150) / top
    parts, y = [], 40.0
    for row in rows:
        height = len(row.bars) * (BAR + GAP) - GAP
        parts.append(_text(LABEL - 10, y + height / 2 + 5, row.label, anchor="end"))
        for bar in row.bars:
            width = max(2.0, bar.value * scale)
            fill = "var(--plot-ours, #2f7fd0)" if bar.ours else "var(--plot-theirs, #8f98a3)"
            parts.append(f'<rect x="{LABEL}" y="{y:.0f}" width="{width:.1f}" height="{BAR}" rx="3" fill="{fill}"/>')
            parts.append(_text(LABEL + width + 8, y + BAR / 2 + 5, bar.text))
            y += BAR + GAP
        y += ROW_GAP - GAP
    head = _text(0, 18, title, weight="600")
    body = "\n".join([head, *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" font-family="system-ui, sans-serif" '
        f'font-size="14" fill="var(--md-default-fg-color, #6b7684)">\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, words: str, anchor: str = "start", weight: str = "400") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


DRAWN: dict[str, Callable[[], str]] = {
    "launch.svg": launch,
    "overhead.svg": overhead,
    "memory.svg": memory,
    "checkpoints.svg": checkpoints,
    "help.svg": help_text,
}


def main() -> None:
    PLOTS.mkdir(exist_ok=True)
    for name, plot in DRAWN.items():
        (PLOTS / name).write_text(plot())
        print(f"docs/plots/{name}")


if __name__ == "__main__":
    main()
