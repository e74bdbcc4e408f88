"""Goodput on the page: how much of the wall time went into steps that count, and what the rest was lost to."""

from __future__ import annotations

from echelon.observe.goodput import LOST, Goodput
from echelon.observe.page.text import duration, safe

__all__ = ["productive"]


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
