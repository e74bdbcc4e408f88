"""Learning rates along training."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from echelon.loop.callbacks.intervals import LogsAtInterval
from echelon.loop.state import State
from echelon.parallel.state.partition import parameter_groups

__all__ = ["LearningRateMonitor", "learning_rates"]


def learning_rates(optimizer: Optimizer, prefix: str) -> dict[str, Any]:
    """The rate of each parameter group, as "<prefix>/<the group's name, or pg>:<its number among those of this name>"."""
    seen: dict[str, int] = {}
    rates: dict[str, Any] = {}
    # A group's parameters may all be another rank's.
    for group, parameters in zip(optimizer.param_groups, parameter_groups(optimizer), strict=True):
        if parameters and group.get("lr") is not None:
            name = str(group.get("name", "pg"))
            rates[f"{prefix}/{name}:{seen.setdefault(name, 0)}"] = group["lr"]
            seen[name] += 1
    return rates


class LearningRateMonitor(LogsAtInterval):
    """Logs the learning rates of the unit's optimizers, and of its schedulers' optimizers, as
    "optimizers/<attribute>/<group>:<number>" and "lr_schedulers/<attribute>/<group>:<number>".

    Args:
        loggers: one or several.
        logging_interval: "epoch" logs as epochs start, "step" before each step; by number of completed steps in both cases.
    """

    def on_train_epoch_start(self, state: State, unit: Any) -> None:
        if self.logging_interval == "epoch":
            self._log(unit)

    def on_train_step_start(self, state: State, unit: Any) -> None:
        if self.logging_interval == "step":
            self._log(unit)

    def _log(self, unit: Any) -> None:
        rates: dict[str, Any] = {}
        for name, optimizer in unit.tracked_optimizers().items():
            rates |= learning_rates(optimizer, f"optimizers/{name}")
        for name, scheduler in unit.tracked_lr_schedulers().items():
            rates |= learning_rates(scheduler.optimizer, f"lr_schedulers/{name}")
        for logger in self._loggers:
            logger.log_dict(rates, unit.train_progress.num_steps_completed)
