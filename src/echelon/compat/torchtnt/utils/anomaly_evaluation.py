"""torchtnt.utils.anomaly_evaluation: what says of a metric's latest value whether something is wrong."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from echelon.contracts.errors import UsageError
from echelon.observe.loggers.logger import Scalar, scalar_to_float

__all__ = ["IsNaNEvaluator", "MetricAnomalyEvaluator", "ThresholdEvaluator"]


class MetricAnomalyEvaluator(ABC):
    """Sees every value of one metric, and says of the latest whether something is wrong."""

    @abstractmethod
    def update(self, value: Scalar) -> None: ...

    @abstractmethod
    def is_anomaly(self) -> bool: ...


class ThresholdEvaluator(MetricAnomalyEvaluator):
    """A value below `min_val` or above `max_val` is wrong. nan is neither: see `IsNaNEvaluator`."""

    def __init__(self, *, min_val: float = -math.inf, max_val: float = math.inf) -> None:
        if min_val > max_val:
            raise UsageError(f"min_val must be at most max_val, {max_val}, got {min_val}.")
        self._min, self._max, self._value = min_val, max_val, math.nan

    def update(self, value: Scalar) -> None:
        self._value = scalar_to_float(value)

    def is_anomaly(self) -> bool:
        return self._value < self._min or self._value > self._max


class IsNaNEvaluator(MetricAnomalyEvaluator):
    """nan is wrong."""

    def __init__(self) -> None:
        self._value = 0.0

    def update(self, value: Scalar) -> None:
        self._value = scalar_to_float(value)

    def is_anomaly(self) -> bool:
        return math.isnan(self._value)
