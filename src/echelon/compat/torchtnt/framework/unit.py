"""torchtnt.framework.unit: echelon's units. `on_*_step_end` is no hook of theirs there, so the loop leaves a method of that name
to its unit.
"""

from typing import Any, TypeAlias, TypeVar

from echelon.compat.torchtnt.utils.progress import Progress
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

    def __init__(self) -> None:
        super().__init__()
        self.train_progress = Progress()


class EvalUnit(unit.EvalUnit[TEvalData]):
    """As `echelon.EvalUnit`."""

    reports_own_steps = True

    def __init__(self) -> None:
        super().__init__()
        self.eval_progress = Progress()


class PredictUnit(unit.PredictUnit[TPredictData]):
    """As `echelon.PredictUnit`."""

    reports_own_steps = True

    def __init__(self) -> None:
        super().__init__()
        self.predict_progress = Progress()


class TestUnit(unit.TestUnit[TTestData]):
    """As `echelon.TestUnit`."""

    reports_own_steps = True

    def __init__(self) -> None:
        super().__init__()
        self.test_progress = Progress()


# For annotations.
TTrainUnit: TypeAlias = TrainUnit[Any]
TEvalUnit: TypeAlias = EvalUnit[Any]
TPredictUnit: TypeAlias = PredictUnit[Any]
TTestUnit: TypeAlias = TestUnit[Any]
