"""The table of `echelon doctor`: 80 columns, with a remedy below each line that is not well."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from echelon.common.terminal import one_line
from echelon.doctor.reports import Checkup

__all__ = ["Row", "State", "as_json", "table"]

_WIDTH = 80

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        state: "ok"; "warn" for what costs speed or may fail later; "fail" for what must be fixed.
        said: what was found.
        remedy: what to do; empty if all is well.
    """

    name: str
    state: State
    said: str
    remedy: str = ""


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a terminal."""
    width = max((len(row.name) for row in rows), default=0)
    lines = []
    for row in rows:
        first = f"{row.state:<4}  {one_line(row.name):<{width}}  "
        rest = " " * len(first)
        lines += textwrap.wrap(one_line(row.said), _WIDTH, initial_indent=first, subsequent_indent=rest) or [first.rstrip()]
        if row.remedy:
            lines += textwrap.wrap(f"-> {one_line(row.remedy)}", _WIDTH, initial_indent=rest, subsequent_indent=f"{rest}   ")
    failed, warned = (sum(row.state == state for row in rows) for state in ("fail", "warn"))
    lines.append("all is well" if not failed + warned else f"{failed} failed, {warned} to look at")
    return lines


def as_json(rows: Sequence[Row], checkup: Checkup) -> dict[str, Any]:
    """For programs: the rows, and every rank's report."""
    return {
        "ok": not any(row.state == "fail" for row in rows),
        "rows": [{"name": r.name, "state": r.state, "said": r.said, "remedy": r.remedy} for r in rows],
        "ranks": {
            str(report.rank): {"host": report.host, **report.values, "errors": report.errors} for report in checkup.in_order
        },
        "silent": checkup.silent,
    }
