"""torchtnt.utils.loggers.anomaly_logger: loggers that look at the numbers they are given, and tell when one is wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.compat.torchtnt.utils.anomaly_evaluation import MetricAnomalyEvaluator
from echelon.contracts.errors import require
from echelon.observe.loggers.logger import Scalar, scalar_to_float

__all__ = ["AnomalyLogger", "TrackedMetric"]

logger = logging.getLogger(__name__)


@dataclass
class TrackedMetric:
    """A metric to look at.

    Args:
        name: under which it is logged.
        anomaly_evaluators: each is asked by itself; one object for several metrics would mix their values.
        warmup_steps: values of steps up to this one are not looked at.
        evaluate_every_n_steps: look at steps that are multiples of it; looking makes the host wait for a GPU's number.
    """

    name: str
    anomaly_evaluators: Sequence[MetricAnomalyEvaluator]
    warmup_steps: int = 0
    evaluate_every_n_steps: int = 1

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, "warmup_steps", "at least 0", self.warmup_steps)
        require(self.evaluate_every_n_steps >= 1, "evaluate_every_n_steps", "at least 1", self.evaluate_every_n_steps)


class AnomalyLogger:
    """Looks at tracked metrics; subclass it, or a logger that inherits from it, and override `on_anomaly_detected`."""

    def __init__(self, tracked_metrics: Sequence[TrackedMetric] | None = None) -> None:
        self._tracked: dict[str, TrackedMetric] = {}
        for metric in tracked_metrics or ():
            if metric.name in self._tracked:
                logger.warning("metric %s is tracked twice; the first is used, with its own evaluators", metric.name)
            self._tracked.setdefault(metric.name, metric)

    def log(self, name: str, data: Scalar, step: int) -> None:
        self._look_at(name, data, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        for name, data in payload.items():
            self._look_at(name, data, step)

    def close(self) -> None: ...

    def on_anomaly_detected(self, name: str, data: Scalar, step: int) -> None:
        """Called for each evaluator that finds a value wrong. By default it is logged as a warning."""
        logger.warning("step %s: %s is %s", step, name, scalar_to_float(data))

    def _look_at(self, name: str, data: Scalar, step: int) -> None:
        metric = self._tracked.get(name)
        if metric is None or step <= metric.warmup_steps or step % metric.evaluate_every_n_steps:
            return
        for evaluator in metric.anomaly_evaluators:
            evaluator.update(data)
            if evaluator.is_anomaly():
                self.on_anomaly_detected(name, data, step)
