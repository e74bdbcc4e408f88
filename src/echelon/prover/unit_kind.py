"""What trains in a script that is proved: the one place that tells kinds of units apart."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Self

from echelon.loop.auto.auto import AutoUnit
from echelon.loop.own.loop_unit import LoopUnit

__all__ = ["UnitKind"]


class UnitKind(StrEnum):
    LOSS = "a loss"
    LOSSES = "losses of several optimizers"  # of one unit, which the loop takes in turn
    STEP = "a step of the user's own"
    LOOP = "a loop of the user's own"
    LOOP_OF_SEVERAL = "a loop of the user's own with several optimizers"

    @classmethod
    def of(cls, unit: Any) -> Self:
        if isinstance(unit, LoopUnit):
            return cls(cls.LOOP_OF_SEVERAL if unit.has_several else cls.LOOP)
        if isinstance(unit, AutoUnit):
            return cls(cls.LOSSES if unit.has_several else cls.LOSS)
        return cls(cls.STEP)

    @property
    def is_loop(self) -> bool:
        return self in (UnitKind.LOOP, UnitKind.LOOP_OF_SEVERAL)

    @property
    def is_of_several(self) -> bool:
        """Whether a loss can come after another optimizer's step."""
        return self in (UnitKind.LOSSES, UnitKind.LOOP_OF_SEVERAL)

    @property
    def draws_by_itself(self) -> bool:
        """Whether the user's code decides what dropout draws, so that nobody can repeat it."""
        return self.is_loop or self is UnitKind.STEP

    @property
    def updates_are_ours(self) -> bool:
        """Whether echelon's Update takes its loss to the optimizer's step: of all but a step of the user's own."""
        return self is not UnitKind.STEP
