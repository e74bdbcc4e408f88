"""torchtnt.framework.unit: echelon's units. `on_*_step_end` is no hook of TorchTNT's units, so the loop does not call it."""

from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from echelon.compat.torchtnt.utils.helpers import Progress
from echelon.loop import unit
from echelon.loop.unit import LRScheduler, Stateful

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


_TRACKED = (nn.Module, torch.optim.Optimizer, *LRScheduler, Progress, Stateful)


class AppStateMixin(unit.AppStateMixin):
    """As echelon's. Tracked attributes may only be set after `super().__init__()`, as in TorchTNT.

    Raises:
        AttributeError: one was set too early.
    """

    _may_track = False

    def __init__(self) -> None:
        self.__dict__["_may_track"] = True
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._may_track and isinstance(value, _TRACKED) and not isinstance(value, type):
            raise AttributeError("Please call super().__init__() before setting attributes.")
        super().__setattr__(name, value)


class TrainUnit(AppStateMixin, unit.TrainUnit[TTrainData]):
    """As `echelon.TrainUnit`."""

    reports_own_steps = True

    def __init__(self) -> None:
        super().__init__()
        self.train_progress = Progress()


class EvalUnit(AppStateMixin, unit.EvalUnit[TEvalData]):
    """As `echelon.EvalUnit`."""

    reports_own_steps = True

    def __init__(self) -> None:
        super().__init__()
        self.eval_progress = Progress()


class PredictUnit(AppStateMixin, unit.PredictUnit[TPredictData]):
    """As `echelon.PredictUnit`."""

    reports_own_steps = True

    def __init__(self) -> None:
        super().__init__()
        self.predict_progress = Progress()


# For annotations.
TTrainUnit: TypeAlias = TrainUnit[Any]
TEvalUnit: TypeAlias = EvalUnit[Any]
TPredictUnit: TypeAlias = PredictUnit[Any]
