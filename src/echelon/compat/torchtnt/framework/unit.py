"""torchtnt.framework.unit."""

from typing import Any, TypeAlias, TypeVar

from echelon.loop.unit import AppStateMixin, EvalUnit, PredictUnit, TestUnit, TrainUnit

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

# For annotations.
TTrainUnit: TypeAlias = TrainUnit[Any]
TEvalUnit: TypeAlias = EvalUnit[Any]
TPredictUnit: TypeAlias = PredictUnit[Any]
TTestUnit: TypeAlias = TestUnit[Any]
