"""What comparing a row with its reference gave, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["SMALL_SHARE", "Blind", "Difference", "Verdict", "larger"]

SMALL_SHARE = 0.05  # of all elements


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    Args:
        update: from 0.
        phase: "initialisation", "forward", "gradient" or "update".
        tensor: a parameter's or buffer's name, "loss" or "gradient norm".
        relative: the largest difference of an element over the largest element.
        tolerance: what it may be, in the same unit.
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
        tolerance: what it might differ by, relative to its largest value, from rounding alone.
        share: of all elements of its kind.
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
    def resolved(self) -> int:
        """Updates, from the first on, in which little was left uncompared: the loss never, elements to a small share."""
        if self.exact:
            return self.updates
        for k in sorted({b.update for b in self.blind}):
            for phase in ("forward", "gradient", "update"):
                here = [b for b in self.blind if b.update == k and b.phase == phase]
                if any(b.tensor == "loss" for b in here) or sum(b.share for b in here) > SMALL_SHARE:
                    return k
        return self.updates


def larger(a: float, b: float) -> float:
    """The larger one; nan if one of them is."""
    return b if b != b else max(a, b)
