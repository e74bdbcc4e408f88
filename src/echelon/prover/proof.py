"""What proving gave: a row of the table each, and the whole."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from echelon.prover.verdict import Difference

__all__ = ["IN_FLOAT64", "IN_PART", "Proof", "Result", "by_float64"]

IN_PART = "in part"
_DECIDED = "agrees (float64), "


def by_float64(own: str = "float32") -> str:
    """The verdict where float64 decided, as a row's own precision could not."""
    return f"{_DECIDED}{own} is ill-conditioned here"


IN_FLOAT64 = by_float64()


@dataclass
class Result:
    """One row of the table.

    Args:
        verdict: "agrees", "bit-equal", `by_float64()`, "DIFFERS", "in part" (what was compared agrees; the message says what
            could not be tested), "undecided" (rounding alone may change all that could be compared), "failed", or "not
            possible": the strategy refuses this model or world.
        loss, gradient, parameter: largest relative differences from one process over all updates.
        step_s: median seconds per micro-batch step on rank 0, without the first. peak_bytes: largest of all ranks.
        of_tolerance: the largest share of its tolerance that a value used.
        first: what differs first.
        causes: likely ones, each with what was seen.
        undetermined: elements by parameter whose true gradient is zero, so that their value is rounding noise in any run.
        message: why it failed, is not possible or not decided; what float32 showed where float64 had to decide.
        notes: what else is to be said about it, such as which samples its ranks saw.
    """

    label: str
    ranks: int
    verdict: str = ""
    loss: float | None = None
    gradient: float | None = None
    parameter: float | None = None
    updates: int = 0
    step_s: float | None = None
    peak_bytes: int | None = None
    of_tolerance: float | None = None
    first: Difference | None = None
    causes: list[tuple[str, str]] = field(default_factory=list)
    undetermined: dict[str, int] = field(default_factory=dict)
    message: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return self.is_equal or self.verdict == "not possible"

    @property
    def is_partly_equal(self) -> bool:
        """What was compared agrees, and something could not be tested."""
        return self.verdict == IN_PART

    @property
    def is_equal(self) -> bool:
        """It was compared, and trains as one process does."""
        return self.verdict in ("agrees", "bit-equal") or self.verdict.startswith(_DECIDED)


@dataclass
class Proof:
    """The whole table.

    Args:
        dtype: "float32" or "float64".
        notes: what was left out, and what the numbers mean for this script.
    """

    dtype: str
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Every row agrees or is not possible, and one was compared: on several ranks, if any row has several."""
        compared = [r.ranks for r in self.results if r.is_equal]
        several = any(r.ranks > 1 for r in self.results)
        return all(r.agrees for r in self.results) and max(compared, default=0) > (1 if several else 0)

    @property
    def holds_in_part(self) -> bool:
        """No row speaks against it, and some could be compared in part alone."""
        rows = self.results
        return not self.holds and any(r.is_partly_equal for r in rows) and all(r.agrees or r.is_partly_equal for r in rows)

    def to_json(self) -> dict[str, Any]:
        """For JSON, which has no word for nan and infinity: they are null."""
        rows = [_without_nan(asdict(r)) for r in self.results]
        return {"holds": self.holds, "dtype": self.dtype, "notes": self.notes, "rows": rows}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
