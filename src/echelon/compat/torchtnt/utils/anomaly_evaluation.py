"""torchtnt.utils.anomaly_evaluation: what says of a metric's latest value whether something is wrong."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from echelon.common.errors import UsageError
from echelon.observe.loggers.logger import Scalar, scalar_to_float

__all__ = ["IsNaNEvaluator", "MetricAnomalyEvaluator", "ThresholdEvaluator"]


class MetricAnomalyEvaluator(ABC):
    """Sees every value of one metric, and says of the latest whether something is wrong."""

    @abstractmethod
    def update(self, value: Scalar) -> None: ...

    @abstractmethod
    def is_anomaly(self) -> bool: ...


class ThresholdEvaluator(MetricAnomalyEvaluator):
    """A value that is not between `min_val` and `max_val` is wrong, and so is nan.

    Attributes:
        curr_val: the latest value.
    """

    def __init__(self, *, min_val: float = -math.inf, max_val: float = math.inf) -> None:
        if min_val > max_val:
            raise UsageError(f"min_val must be at most max_val, {max_val}, got {min_val}.")
        self.min_val, self.max_val = min_val, max_val
        self.curr_val: float = min_val

    def update(self, value: Scalar) -> None:
        self.curr_val = scalar_to_float(value)

    def is_anomaly(self) -> bool:
        return not self.min_val <= self.curr_val <= self.max_val


class IsNaNEvaluator(MetricAnomalyEvaluator):
    """nan is wrong.

    Attributes:
        curr_val: the latest value.
    """

    def __init__(self) -> None:
        self.curr_val: float = 0

    def update(self, value: Scalar) -> None:
        self.curr_val = scalar_to_float(value)

    def is_anomaly(self) -> bool:
        return math.isnan(self.curr_val)
