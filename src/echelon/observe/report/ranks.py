"""Where each rank's time went: a bar per rank, and a map of ranks over steps that the page's script paints."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from echelon.contracts.times import PARTS, TimeRecord
from echelon.observe.amounts import milliseconds
from echelon.observe.attempt_times import AttemptTimes
from echelon.observe.recent import KEPT
from echelon.observe.report.text import safe, script_json, stacked_bar
from echelon.observe.stragglers import stragglers

__all__ = ["Spent", "ranks", "spent_of"]

_CELLS = 4096  # most cells of the map
_COLUMNS = 120
_ROWS = 64  # most rows; more ranks are shown in groups, each by its slowest rank
_BARS = 16
_NAMED = 5  # most stragglers named
_NAMES = {
    "data_s": "data",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
    "wait_s": "waiting for other ranks",
    "checkpoint_s": "checkpoint",
    "eval_s": "evaluation",
    "other_s": "other",
}


# Parts that are not a rank's own time in a step.
_NOT_OWN = ("wait_s", "checkpoint_s", "eval_s")


@dataclass
class Spent:
    """The time of one rank: over all its steps, and in each column of the map.

    Attributes:
        parts: seconds by part, of the steps that counted in the end.
        steps: number of these steps.
        cells: (steps, seconds by part) per column.
        line: the line of the user's code with most of its own time, from the latest record that has one.
        latest: the last records of the latest attempt.
    """

    rank: int
    cells: list[tuple[float, list[float]]]
    line: str = ""
    host: str = ""
    parts: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    steps: float = 0.0
    latest: deque[TimeRecord] = field(default_factory=lambda: deque(maxlen=KEPT))

    def settle(self) -> None:
        for steps, parts in self.cells:
            self.steps += steps
            self.parts = [a + b for a, b in zip(self.parts, parts, strict=True)]

    def own_s(self) -> float:
        """Seconds per step, without waiting for others, checkpoints and evaluations."""
        total = sum(spent for part, spent in zip(PARTS, self.parts, strict=True) if part not in _NOT_OWN)
        return total / self.steps if self.steps else 0.0


def spent_of(times: Sequence[AttemptTimes]) -> tuple[list[Spent], tuple[int, int]]:
    """The ranks' times over all attempts, and the range of steps of the columns; repeated steps count once.

    Reads the records again, and holds a few per rank.
    """
    spans = [each.steps for each in times if each.steps is not None]
    if not spans:
        return [], (0, 0)
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    everyone = sorted({rank for each in times for rank in each.ranks})
    columns = max(1, min(_COLUMNS, high - low, _CELLS // min(len(everyone), _ROWS)))
    spent = {rank: Spent(rank, [(0.0, [0.0] * len(PARTS)) for _ in range(columns)]) for rank in everyone}
    for attempt in times:
        if attempt.began is not None:  # an attempt without a step repeated nothing
            _forget(spent.values(), _column(attempt.began, low, high, columns))
        for each in spent.values():
            each.latest.clear()
        for rank, records in attempt.by_rank():
            for record in records:
                _spread(spent[rank], record, low, high)
                spent[rank].latest.append(record)
    for each in spent.values():
        each.settle()
    return list(spent.values()), (low, high)


def _forget(spent: Iterable[Spent], column: int) -> None:
    """Forget the columns after the one where a later attempt began, which repeats their steps."""
    for each in spent:
        each.cells[column + 1 :] = [(0.0, [0.0] * len(PARTS)) for _ in each.cells[column + 1 :]]


def _column(step: float, low: int, high: int, columns: int) -> int:
    return max(0, min(columns - 1, int(columns * (step - low) / max(1, high - low))))  # records may have been added since


def _spread(spent: Spent, record: TimeRecord, low: int, high: int) -> None:
    """Spread a record's time evenly over the columns of its steps."""
    columns = len(spent.cells)
    first, last = (_column(step, low, high, columns) for step in (record.steps[0], max(record.steps[0], record.steps[1] - 1)))
    share = 1.0 / (last - first + 1)
    parts = [getattr(record, part) * share for part in PARTS]
    for at in range(first, last + 1):
        steps, known = spent.cells[at]
        spent.cells[at] = (steps + record.count * share, [a + b for a, b in zip(known, parts, strict=True)])
    spent.line, spent.host = record.line or spent.line, record.host or spent.host


def ranks(times: Sequence[AttemptTimes]) -> str:
    """The section of a run; empty without times."""
    spent, (low, high) = spent_of(times)
    if not spent:
        return ""
    slow_ranks = stragglers({each.rank: list(each.latest) for each in spent})
    slow = "".join(f"<p>{safe(str(each)[:1].upper() + str(each)[1:], 400)}.</p>" for each in slow_ranks[:_NAMED])
    keys = "".join(f'<span class="key p{n}">{_NAMES[part]}</span>' for n, part in enumerate(PARTS))
    return (
        f'<section class="ranks"><h2>Where the time goes</h2><span class="legend">{keys}</span>{slow}{_bars(spent)}'
        f"{_map(spent, low, high)}</section>"
    )


def _bars(spent: Sequence[Spent]) -> str:
    """A step of each rank as a bar, in milliseconds; of many ranks, the slowest by their own time."""
    slowest = sorted(spent, key=lambda each: -each.own_s())
    shown = sorted(slowest[:_BARS], key=lambda each: each.rank)
    whole = max((sum(each.parts) / max(each.steps, 1e-9) for each in shown if each.steps), default=0.0) or 1.0
    rows = []
    for each in shown:
        steps = each.steps or float("inf")
        a_step = [
            (f"p{n}", each.parts[n] / steps, f"{_NAMES[part]} {milliseconds(each.parts[n] / steps)}")
            for n, part in enumerate(PARTS)
        ]
        bar = stacked_bar(
            ((kind, 100 * s / whole, label) for kind, s, label in a_step), ", ".join(label for _, s, label in a_step if s > 0)
        )
        cells = f"<td>{milliseconds(sum(each.parts) / steps)}</td><td>{milliseconds(each.own_s())}</td>"
        rows.append(f'<tr><th scope="row">{each.rank}</th>{cells}<td>{bar}</td><td>{safe(each.line or "", 120)}</td></tr>')
    head = "".join(f"<th>{name}</th>" for name in ("rank", "a step", "its own", "", "its slowest line"))
    more = f'<p class="none">The {_BARS} slowest of {len(spent)} ranks.</p>' if len(spent) > _BARS else ""
    made = f'<table class="rows bars"><thead><tr>{head}</tr></thead>{"".join(rows)}</table>'
    return f'<div class="scroll" tabindex="0">{made}</div>{more}'


def _map(spent: Sequence[Spent], low: int, high: int) -> str:
    size = -(-len(spent) // _ROWS)
    groups = [spent[at : at + size] for at in range(0, len(spent), size)]
    labels = [str(g[0].rank) if len(g) == 1 else f"{g[0].rank} to {g[-1].rank}" for g in groups]
    views = {"its own time": [p for p in PARTS if p not in _NOT_OWN], "everything": list(PARTS)}
    views |= {name: [part] for part, name in _NAMES.items() if any(each.parts[PARTS.index(part)] for each in spent)}
    layers = {name: [_row(group, parts) for group in groups] for name, parts in views.items()}
    grouped = " of the slowest rank of each group" if size > 1 else ""
    data = script_json({"steps": [low, high], "ranks": labels, "layers": layers})
    choices = "".join(f"<option>{name}</option>" for name in layers)
    return (
        f'<div class="heat" hidden><label>Milliseconds a step{grouped}: <select>{choices}</select></label>'
        '<span class="scale"><span></span><i></i><span></span></span>'
        f'<div class="grid"><div class="names"></div><div class="cells" tabindex="0" role="application" '
        f'aria-label="map of ranks over steps; arrow keys move"><canvas></canvas><b></b>'
        f'<div class="tip" role="status"></div></div></div>'
        f'<p class="ends"><span>update {low:,}</span><span>update {high:,}</span></p>'
        f'<script type="application/json">{data}</script></div>'
    )


def _row(group: Sequence[Spent], parts: Sequence[str]) -> list[float | None]:
    """Milliseconds per step in each column, of the slowest rank of a group; None where no step ended."""
    at = [PARTS.index(part) for part in parts]
    row: list[float | None] = []
    for column in range(len(group[0].cells)):
        cells = [each.cells[column] for each in group]
        values = [1e3 * sum(spent[n] for n in at) / steps for steps, spent in cells if steps]
        row.append(float(f"{max(values):.3g}") if values else None)
    return row
