"""torchtnt.framework.unit: echelon's units. `on_*_step_end` is no hook of theirs there, so the loop leaves a method of that name
to its unit.
"""

from typing import Any, TypeAlias, TypeVar

from echelon.compat.torchtnt.absent import absent
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
    "TTrainData",
    "TTrainUnit",
    "TrainUnit",
]

TTrainData = TypeVar("TTrainData")
TEvalData = TypeVar("TEvalData")
TPredictData = TypeVar("TPredictData")


class TrainUnit(unit.TrainUnit[TTrainData]):
    """As `echelon.TrainUnit`."""

    reports_own_steps = True


class EvalUnit(unit.EvalUnit[TEvalData]):
    """As `echelon.EvalUnit`."""

    reports_own_steps = True


class PredictUnit(unit.PredictUnit[TPredictData]):
    """As `echelon.PredictUnit`."""

    reports_own_steps = True


# For annotations.
TTrainUnit: TypeAlias = TrainUnit[Any]
TEvalUnit: TypeAlias = EvalUnit[Any]
TPredictUnit: TypeAlias = PredictUnit[Any]

__getattr__ = absent(__name__)
