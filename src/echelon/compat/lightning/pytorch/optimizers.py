"""The optimizers and schedules in what `configure_optimizers` returns; and when schedules advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from echelon.common.errors import UsageError

__all__ = ["LightningOptimizer", "NoOptimizer", "Schedule", "Schedules", "configured", "not_logged"]


@dataclass
class Schedule:
    """A scheduler, and when it advances.

    Args:
        interval, frequency: after every n-th "step" (an update) of an epoch, or every n-th "epoch".
        monitor: the logged value that ReduceLROnPlateau sees.
        strict: whether it is an error if `monitor` was not logged.
        name: for LearningRateMonitor.
    """

    scheduler: Any
    interval: Literal["step", "epoch"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False

    @classmethod
    def of(cls, given: Any, monitor: str | None, *, automatic: bool) -> Schedule:
        options = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
        made = cls(**options)
        if made.interval not in ("step", "epoch"):
            raise UsageError(f"configure_optimizers: interval must be 'step' or 'epoch', got {made.interval!r}.")
        made.reduce_on_plateau = made.reduce_on_plateau or isinstance(made.scheduler, ReduceLROnPlateau)
        made.monitor = made.monitor or monitor
        if automatic and made.reduce_on_plateau and made.monitor is None:
            raise UsageError(
                "configure_optimizers: ReduceLROnPlateau needs a monitor: "
                '{"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}.'
            )
        return made


class NoOptimizer(torch.optim.Optimizer):
    """Used if `configure_optimizers` returns None: it updates nothing."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> Any:
        return closure() if closure is not None else None


def configured(made: Any, *, automatic: bool) -> tuple[list[torch.optim.Optimizer], list[Schedule]]:
    """Optimizers and schedules of what a module's `configure_optimizers` returned.

    Raises:
        UsageError: it returned something else than is allowed, or several optimizers without manual optimization.
    """
    optimizers, schedules = _taken_apart(made)
    if automatic and len(optimizers) > 1:
        raise UsageError(
            f"configure_optimizers returned {len(optimizers)} optimizers. With several, set `self.automatic_optimization = "
            "False` in __init__, and take them in training_step: `first, second = self.optimizers()`."
        )
    configs = [Schedule.of(each, monitor, automatic=automatic) for each, monitor in schedules]
    for each in configs:
        if getattr(each.scheduler, "optimizer", optimizers[0]) not in optimizers:
            raise UsageError("configure_optimizers: a scheduler has an optimizer that is not returned with it.")
        if not (hasattr(each.scheduler, "state_dict") and hasattr(each.scheduler, "load_state_dict")):
            raise UsageError(f"configure_optimizers: {type(each.scheduler).__name__} has no state_dict and load_state_dict.")
    for optimizer in optimizers:
        if automatic and isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError("LBFGS asks for several passes to an update: set `self.automatic_optimization = False`.")
    return optimizers, configs


def _taken_apart(made: Any) -> tuple[list[torch.optim.Optimizer], list[tuple[Any, str | None]]]:
    """(optimizers; schedules, each with its optimizer's monitor)."""
    given = [made] if isinstance(made, (torch.optim.Optimizer, Mapping)) else made
    if isinstance(given, (list, tuple)) and given:
        if (
            len(given) == 2
            and isinstance(given[0], (list, tuple))
            and all(isinstance(o, torch.optim.Optimizer) for o in given[0])
        ):
            schedules = given[1] if isinstance(given[1], (list, tuple)) else [given[1]]
            return list(given[0]), [(each, None) for each in schedules]
        if all(isinstance(each, (torch.optim.Optimizer, Mapping)) for each in given):
            dicts = [each if isinstance(each, Mapping) else {"optimizer": each} for each in given]
            scheduled = [each for each in dicts if each.get("lr_scheduler") is not None]
            return [_optimizer_in(each) for each in dicts], [(each["lr_scheduler"], each.get("monitor")) for each in scheduled]
    raise UsageError(
        f"configure_optimizers returned {type(made).__name__}, which is none of: an optimizer, a list of them, a pair of lists "
        'of optimizers and schedulers, {"optimizer": ..., "lr_scheduler": ...}, a list of such dicts, None.'
    )


def _optimizer_in(made: Mapping[str, Any]) -> torch.optim.Optimizer:
    if unknown := sorted(made.keys() - {"optimizer", "lr_scheduler", "monitor", "frequency"}):
        raise UsageError(f"configure_optimizers: its dict has no {unknown[0]!r}.")
    optimizer = made.get("optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"configure_optimizers: its dict must have an 'optimizer', got {optimizer!r}.")
    return optimizer


class Schedules:
    """All schedules of a run; part of checkpoints.

    Args:
        advance: as `LightningModule.lr_scheduler_step`.
    """

    def __init__(self, schedules: list[Schedule], advance: Callable[[Any, Any], None]) -> None:
        self.all, self._advance = schedules, advance

    def step(self, interval: str, count: int, metrics: Mapping[str, Any] | None) -> None:
        """Advance the schedules of an interval.

        Args:
            count: how many of these intervals have passed: batches of this epoch, or epochs.
            metrics: logged values: advance only schedules that need a metric; None: only those that need none.
        Raises:
            UsageError: a schedule's `monitor` was not logged.
        """
        for each in self.all:
            if each.interval != interval or count % each.frequency or each.reduce_on_plateau == (metrics is None):
                continue
            seen = None
            if metrics is not None:
                seen = metrics.get(each.monitor or "")
                if seen is None and each.strict:
                    raise not_logged("ReduceLROnPlateau", each.monitor, metrics)
                if seen is None:
                    continue
            self._advance(each.scheduler, seen)

    def state_dict(self) -> dict[str, Any]:
        return {"schedulers": [each.scheduler.state_dict() for each in self.all]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each, state in zip(self.all, state_dict["schedulers"], strict=True):
            each.scheduler.load_state_dict(state)


def not_logged(who: str, monitor: str | None, metrics: Mapping[str, Any], where: str = "") -> UsageError:
    """The error of who monitors a number that is not there."""
    return UsageError(f"{who} monitors {monitor!r}, which was not logged{where}; logged were: {', '.join(metrics) or 'nothing'}.")


class LightningOptimizer:
    """The optimizer that `self.optimizers()` returns: its steps are counted and call the hooks.

    Args:
        step: called with the optimizer and a closure or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[..., Any], module: Any) -> None:
        self._optimizer, self._step, self._module = optimizer, step, module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        return self._step(self._optimizer, closure, **options)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Context in which only this optimizer's parameters get gradients. `sync_grad` has no effect: each pass averages."""
        self._module.toggle_optimizer(self)
        try:
            yield
        finally:
            self._module.untoggle_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
