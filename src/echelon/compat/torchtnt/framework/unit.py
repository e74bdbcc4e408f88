"""torchtnt.framework.unit: echelon's units. `on_*_step_end` is no hook of theirs there, so the loop leaves a method of that name
to its unit.
"""

from typing import Any, TypeAlias, TypeVar

from echelon.loop import unit
from echelon.loop.unit import AppStateMixin

__all__ = [
    "AppStateMixin",
    "EvalUnit",
    "PredictUnit",
    "TEvalData",
    "TEvalUnit",
    "TPredictData",
    "TPredictUnit",
    "TTestUnit",
    "TTrainData",
    "TTrainUnit",
    "TestUnit",
    "TrainUnit",
]

TTrainData = TypeVar("TTrainData")
TEvalData = TypeVar("TEvalData")
TPredictData = TypeVar("TPredictData")
TTestData = TypeVar("TTestData")


class TrainUnit(unit.TrainUnit[TTrainData]):
    """As `echelon.TrainUnit`."""

    reports_own_steps = True


class EvalUnit(unit.EvalUnit[TEvalData]):
    """As `echelon.EvalUnit`."""

    reports_own_steps = True


class PredictUnit(unit.PredictUnit[TPredictData]):
    """As `echelon.PredictUnit`."""

    reports_own_steps = True


class TestUnit(unit.TestUnit[TTestData]):
    """As `echelon.TestUnit`."""

    reports_own_steps = True


# For annotations.
TTrainUnit: TypeAlias = TrainUnit[Any]
TEvalUnit: TypeAlias = EvalUnit[Any]
TPredictUnit: TypeAlias = PredictUnit[Any]
TTestUnit: TypeAlias = TestUnit[Any]
