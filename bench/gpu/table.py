"""The rows of a run as a table: on the screen, and in BENCHMARKS.md between two comments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.rows import Row, write_whole

__all__ = ["BEGIN", "END", "as_lines", "as_markdown", "into_file"]

BEGIN, END = "<!-- make gpu: begin -->", "<!-- make gpu: end -->"


def as_lines(rows: Sequence[Row]) -> list[str]:
    """The rows as lines for a terminal, with their remarks."""
    width = max((len(row.name) for row in rows), default=0)
    return [f"    {row.name:<{width}}  {row.measured}" + (f"   ({row.remark})" if row.remark else "") for row in rows]


def as_markdown(facts: dict[str, Any], rows: Iterable[Row]) -> str:
    where, took = f"{facts['device']}, commit {facts['commit']}", f"{facts['took_s']:.0f} s"
    lines = [
        f"Measured on {facts['date']}, {where}; `{facts['command']}`; {took}.",
        "",
        "| part | what | measured | remark |",
        "|---|---|---|---|",
    ]
    before = None
    for row in rows:
        cells = ["" if row.part == before else row.part, row.name, row.measured, row.remark]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
        before = row.part
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def into_file(path: Path, table: str) -> None:
    """Put a table between the two comments; if they are missing, they are added at the end."""
    text = path.read_text()
    block = f"{BEGIN}\n{table}\n{END}"
    head, begin, rest = text.partition(BEGIN)
    if begin and END in rest:
        text = head + block + rest.partition(END)[2]
    else:
        text = f"{text.rstrip()}\n\n## One GPU: `make gpu`\n\n[docs/gpu.md](docs/gpu.md) says what each row means.\n\n{block}\n"
    write_whole(path, text)
