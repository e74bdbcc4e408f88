"""torchtnt.utils.loggers.anomaly_logger: loggers that look at the numbers they are given, and tell when one is wrong."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.common.errors import require
from echelon.compat.torchtnt.utils.anomaly_evaluation import MetricAnomalyEvaluator
from echelon.compat.torchtnt.utils.loggers.utils import scalar_to_float
from echelon.observe.loggers.logger import Scalar

__all__ = ["AnomalyLogger", "TrackedMetric"]

logger = logging.getLogger(__name__)


@dataclass
class TrackedMetric:
    """A metric to look at.

    Args:
        name: under which it is logged.
        anomaly_evaluators: each is asked by itself; one object for several metrics would mix their values.
        warmup_steps: after steps up to this one evaluators are told the value, and not asked.
        evaluate_every_n_steps: ask after steps that are multiples of it. Evaluators are told every value, and the host waits for
            a GPU's.
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
        times = Counter(metric.name for metric in tracked_metrics or ())
        for name in (name for name, number in times.items() if number > 1):
            logger.warning("Found multiple configs for metric '%s'. Skipping.", name)
        self._tracked = {metric.name: metric for metric in tracked_metrics or () if times[metric.name] == 1}
        if tracked_metrics:
            logger.info("Started tracking anomalies for the following metrics: %s", list(self._tracked))

    def log(self, name: str, data: Scalar, step: int) -> None:
        self._look_at(name, data, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        for name, data in payload.items():
            self._look_at(name, data, step)

    def close(self) -> None: ...

    def on_anomaly_detected(self, name: str, data: Scalar, step: int) -> None:
        """Called for each evaluator that finds a value wrong, and for what is no single number. All are warned of, too; what
        this raises is logged."""

    def _look_at(self, name: str, data: Scalar, step: int) -> None:
        metric = self._tracked.get(name)
        if metric is None:
            return
        try:
            value = scalar_to_float(data)
        except ValueError as error:
            logger.warning("Error when extracting a single numerical value from the provided metric: %s", error)
            self.on_anomaly_detected(name, data, step)
            return
        due = step > metric.warmup_steps and step % metric.evaluate_every_n_steps == 0
        for evaluator in metric.anomaly_evaluators:
            evaluator.update(value)
            if due and evaluator.is_anomaly():
                kind = type(evaluator).__name__
                logger.warning("Found anomaly in metric: %s, with value: %s, using evaluator: %s", name, data, kind)
                self._tell(name, value, step)

    def _tell(self, name: str, value: float, step: int) -> None:
        try:
            self.on_anomaly_detected(name, value, step)
        except Exception as error:  # the user's; training goes on
            logger.warning("Exception when calling on_anomaly_hook: %s", error)
