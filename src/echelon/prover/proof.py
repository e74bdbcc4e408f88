"""The results of comparisons as plain values: one row against its reference, a row of the table, and the whole table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "IN_FLOAT64",
    "IN_PART",
    "NOTHING_COMPARED",
    "NOT_ALL_TESTED",
    "OTHERS_DIFFER",
    "SMALL_SHARE",
    "YOURS_DIFFERS",
    "Blind",
    "Difference",
    "Proof",
    "Result",
    "Verdict",
    "by_float64",
    "larger",
]

SMALL_SHARE = 0.05  # of all elements
IN_PART = "in part"
YOURS_DIFFERS, NOT_ALL_TESTED, NOTHING_COMPARED, OTHERS_DIFFER = 1, 3, 4, 5  # exit codes
_DECIDED = "agrees (float64), "


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    Args:
        update: from 0.
        phase: "initialisation", "forward", "gradient" or "update".
        tensor: a parameter's or buffer's name, "loss" or "gradient norm".
        relative: the largest difference of an element over the largest element.
        tolerance: the largest that is allowed, in the same unit.
    """

    update: int
    phase: str
    tensor: str
    relative: float
    tolerance: float


@dataclass(frozen=True)
class Blind:
    """Something that this precision cannot compare.

    Args:
        update, phase, tensor: as in `Difference`.
        tolerance: the difference that rounding alone may cause, relative to its largest value.
        share: its share of all elements of its kind.
    """

    update: int
    phase: str
    tensor: str
    tolerance: float
    share: float


@dataclass
class Verdict:
    """What comparing one row gave: the largest relative differences over all updates, and the first that is too large."""

    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    norm: float = 0.0
    updates: int = 0
    bit_equal: bool = True  # the parameters
    exact: bool = True  # the parameters, the gradients and the loss: the same bits need no measure of rounding
    used: float = 0.0  # the largest share of a tolerance that was used
    first: Difference | None = None
    meaningless: str | None = None  # why the reference itself is no measure
    undetermined: dict[str, int] = field(default_factory=dict)  # excused elements, by parameter
    excused: float = 0.0  # the largest share of all elements that was excused after an update
    blind: list[Blind] = field(default_factory=list)
    unmoved: list[str] = field(default_factory=list)  # parameters that the reference changed and the row did not

    @property
    def clear(self) -> bool:
        """Everything was compared, and nothing differs."""
        return self.first is None and (self.exact or (not self.blind and self.excused <= SMALL_SHARE))

    @property
    def blindness(self) -> str:
        """What could not be compared, in words."""
        reasons = []
        if self.blind:
            b = self.blind[0]
            reasons.append(f"update {b.update}, {b.phase}, {b.tensor}: rounding alone may change it by {b.tolerance:.1e}")
        if self.resolved < self.updates:
            reasons.append(
                f"compared as far as update {self.resolved - 1}" if self.resolved else "nothing else could be compared"
            )
        if self.excused > SMALL_SHARE:
            reasons.append(f"{self.excused:.0%} of all elements have no gradient beyond rounding")
        return "; ".join(reasons)

    @property
    def resolved(self) -> int:
        """How many updates, from the first on, were compared: their loss, and all but a small share of the elements."""
        if self.exact:
            return self.updates
        for k in sorted({b.update for b in self.blind}):
            for phase in ("forward", "gradient", "update"):
                blind = [b for b in self.blind if b.update == k and b.phase == phase]
                if any(b.tensor == "loss" for b in blind) or sum(b.share for b in blind) > SMALL_SHARE:
                    return k
        return self.updates


def larger(a: float, b: float) -> float:
    """The larger one; nan if one of them is."""
    return b if b != b else max(a, b)


def by_float64(own: str = "float32") -> str:
    """The verdict if float64 decided, because a row's own precision could not."""
    return f"{_DECIDED}{own} is ill-conditioned here"


IN_FLOAT64 = by_float64()


@dataclass
class Result:
    """One row of the table.

    Args:
        verdict: "agrees", "bit-equal", `by_float64()`, "DIFFERS", "in part" (what was compared agrees; the message says what
            could not be tested), "undecided" (nothing could be compared, since rounding or another order of draws changes all),
            "failed", or "not possible": the layout refuses this model or world.
        loss, gradient, parameter: largest relative differences from one process over all updates.
        of_tolerance: the largest share of its tolerance that a value used.
        first: what differs first.
        causes: likely ones, each with what was seen.
        undetermined: elements by parameter whose true gradient is zero, so that their value is rounding noise in any run.
        message: why it failed, is not possible or not decided; what float32 showed if float64 had to decide.
        notes: other remarks, such as which samples its ranks saw.
        yours: it has the script's own layout and accumulation, on any number of ranks.
        precision: of its computation; if it differs, that in which `first` was measured. began: it trained before it failed.
    """

    label: str
    ranks: int
    verdict: str = ""
    loss: float | None = None
    gradient: float | None = None
    parameter: float | None = None
    updates: int = 0
    of_tolerance: float | None = None
    first: Difference | None = None
    causes: list[tuple[str, str]] = field(default_factory=list)
    undetermined: dict[str, int] = field(default_factory=dict)
    message: str = ""
    notes: list[str] = field(default_factory=list)
    yours: bool = False
    precision: str = ""
    began: bool = False

    def fill(self, verdict: Verdict) -> None:
        """Take over the numbers of a comparison."""
        self.loss, self.gradient, self.parameter = verdict.loss, larger(verdict.gradient, verdict.norm), verdict.parameter
        self.of_tolerance, self.updates = verdict.used, verdict.updates
        self.first, self.undetermined = verdict.first, verdict.undetermined

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

    @property
    def is_bad(self) -> bool:
        return self.verdict in ("DIFFERS", "failed")

    @property
    def is_compared(self) -> bool:
        return self.is_equal or self.is_partly_equal or self.verdict == "DIFFERS"


@dataclass
class Proof:
    """The whole table.

    Args:
        dtype: "float32" or "float64".
        notes: what was left out, and what the numbers mean for this script.
        interrupted: not all rows were run.
    """

    dtype: str
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def compared(self) -> int:
        """How many rows were compared; if any row has several ranks, only such rows count."""
        several = any(r.ranks > 1 for r in self.results)
        return sum(r.is_compared and (r.ranks > 1 or not several) for r in self.results)

    @property
    def exit_code(self) -> int:
        """0: all rows agree or are not possible. 1: the script's own configuration differs or fails, or any row does if none is
        known to be the script's own. 3: nothing differs, but some rows were compared only in part, or not at all. 4: nothing was
        compared on several ranks. 5: only rows that are not the script's own configuration differ or fail.
        """
        rows = self.results
        yours = [r for r in rows if r.yours] or rows
        if not any(r.is_compared or r.began for r in rows):
            return NOTHING_COMPARED
        if any(r.is_bad for r in rows):
            return YOURS_DIFFERS if any(r.is_bad for r in yours) else OTHERS_DIFFER
        if not self.compared:
            return NOTHING_COMPARED
        whole = all(r.agrees for r in rows) and any(r.is_equal for r in yours) and not self.interrupted
        return 0 if whole else NOT_ALL_TESTED

    @property
    def holds(self) -> bool:
        """Every row agrees or is not possible, and one was compared: on several ranks, if any row has several."""
        return self.exit_code == 0

    @property
    def holds_in_part(self) -> bool:
        """No row differs, but some were compared only in part, or not at all."""
        return self.exit_code == NOT_ALL_TESTED

    def to_json(self) -> dict[str, Any]:
        """For JSON, which has no word for nan and infinity: they are null."""
        rows = [_without_nan(asdict(r)) for r in self.results]
        facts = {"holds": self.holds, "exit_code": self.exit_code, "interrupted": self.interrupted, "dtype": self.dtype}
        return {**facts, "notes": self.notes, "rows": rows}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
