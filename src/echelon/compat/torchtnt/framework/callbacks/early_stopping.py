"""torchtnt.framework.callbacks.early_stopping."""

from __future__ import annotations

from typing import Any, Literal

from echelon.common.errors import UsageError
from echelon.loop.callbacks import early_stopping
from echelon.loop.callbacks.early_stopping import EarlyStopChecker
from echelon.loop.records.monitored import Unknown
from echelon.loop.state import State
from echelon.world import agree

__all__ = ["EarlyStopping"]


class MissingAttributeError(UsageError, RuntimeError):
    """What is monitored is not there, or is no number."""


class EarlyStopping(early_stopping.EarlyStopping):
    """As echelon's. Release 0.2.4 has `interval_freq` where newer sources have `phase`: a number there is meant so."""

    refusal = MissingAttributeError

    def __init__(
        self,
        monitored_attr: str,
        early_stop_checker: EarlyStopChecker,
        interval: Literal["step", "epoch"] = "epoch",
        phase: Any = "train",
        interval_freq: int = 1,
    ) -> None:
        if isinstance(phase, int):
            phase, interval_freq = "train", phase
        super().__init__(monitored_attr, early_stop_checker, interval, phase, interval_freq)

    def _number(self, state: State, unit: Any) -> float:
        try:
            return super()._number(state, unit)
        except Unknown:
            if agree.from_rank0(lambda: hasattr(unit, self.monitored_attr)):
                raise
            raise self.refusal(
                f"Unit does not have attribute '{self.monitored_attr}', unable to read monitored attribute to determine whether "
                "to stop early."
            ) from None
