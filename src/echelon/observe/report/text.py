"""Text for the page: escaped strings, tables and bars."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["NONE", "clean", "safe", "script_json", "stacked_bar", "table", "when"]

NONE = "\N{EN DASH}"
_ROWS = 50  # most rows of a table

# Includes characters that change the direction of text.
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(value: object, limit: int = 500) -> str:
    """Text without control characters, not escaped; a longer text is cut to its last `limit` characters."""
    text = _UNPRINTABLE.sub("", str(value))
    return text if len(text) <= limit else f"… {text[-limit:]}"


def safe(value: object, limit: int = 500) -> str:
    """`clean` text, escaped for an element or a quoted attribute."""
    return escape(clean(value, limit))


def script_json(value: object) -> str:
    """JSON for the inside of `<script>`: no character can end the element. json itself escapes non-ASCII."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def stacked_bar(parts: Iterable[tuple[str, float, str]], words: str) -> str:
    """Parts of a whole as one bar.

    Args:
        parts: for each part its class, its percentage, and its label.
        words: the bar in words, for people who cannot see it.
    """
    x, made = 0.0, []
    for kind, width, label in parts:
        if width > 0.05:
            made.append(
                f'<rect class="{kind}" x="{x:.2f}%" width="{width:.2f}%" height="100%"><title>{safe(label)}</title></rect>'
            )
        x += width
    return f'<svg class="bar" role="img" aria-label="{safe(words, 1000)}">{"".join(made)}</svg>'


def when(seconds: float | None) -> str:
    try:
        return "unknown" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):  # out of a clock's range
        return "unknown"


def table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[object]], empty: str, *, folded: bool = False, most: int = _ROWS
) -> str:
    """A table of texts; without `head`, each row begins with its heading.

    Args:
        head: texts of the header cells.
        empty: text shown instead of a table without rows.
        folded: hide the table until the reader opens it.
        most: number of last rows that are shown.
    """
    if not rows:
        return f'<section><h2>{title}</h2><p class="none">{empty}</p></section>'
    lines = [f"<thead><tr>{''.join(f'<th>{safe(name, 60)}</th>' for name in head)}</tr></thead>"] if head else []
    for row in rows[-most:]:
        cells = [f"<td>{safe(cell, 2000)}</td>" for cell in row]
        if not head:
            cells[0] = f"<th>{safe(row[0], 60)}</th>"
        lines.append(f"<tr>{''.join(cells)}</tr>")
    made = f'<div class="scroll" tabindex="0"><table class="{"rows" if head else "facts"}">{"".join(lines)}</table></div>'
    if len(rows) > most:
        made += f'<p class="none">The last {most} of {len(rows)}.</p>'
    if folded:
        return f"<details><summary>{title}</summary>{made}</details>"
    return f"<section><h2>{title}</h2>{made}</section>"
