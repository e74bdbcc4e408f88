"""`lightning.pytorch.callbacks`: the supported ones; the others say what to use instead."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch

from echelon.common.errors import UsageError, require
from echelon.compat.lightning.pytorch.absent import DISPLAYS, accepted
from echelon.compat.lightning.pytorch.hooks import Callback
from echelon.compat.lightning.pytorch.model_checkpoint import Checkpoint, ModelCheckpoint
from echelon.compat.lightning.pytorch.optimizers import not_logged
from echelon.loop.callbacks.early_stopping import EarlyStopChecker
from echelon.world import agree

__all__ = [  # noqa: PLE0604  # names of a table
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    *DISPLAYS,
]

logger = logging.getLogger(__name__)


class LambdaCallback(Callback):
    """Hooks as functions: `LambdaCallback(on_train_end=lambda trainer, module: ...)`."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, hook in hooks.items():
            if not callable(getattr(Callback, name, None)):
                raise TypeError(f"LambdaCallback: Callback has no {name!r}.")
            setattr(self, name, hook)


class EarlyStopping(Callback, EarlyStopChecker):
    """Stop after `patience` checks in a row without an improvement of more than `min_delta`.

    Args:
        monitor: a logged name. It is checked after each epoch, or after each evaluation if `fit` evaluates at other intervals.
        verbose: log why it stops.
        strict: whether it is an error if `monitor` was not logged.
        check_finite: stop at nan and infinity.
        stopping_threshold, divergence_threshold: stop when the number is better than the first, or worse than the second.
        check_on_train_epoch_end: True checks after each epoch, False after each evaluation; None chooses as above.
    """

    meets = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        limits = (stopping_threshold, divergence_threshold)
        EarlyStopChecker.__init__(self, mode, patience, abs(min_delta), check_finite, "abs", *limits)
        self.monitor, self.verbose, self.strict = monitor, verbose, strict
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self.stopped_epoch = 0

    @property
    def wait_count(self) -> int:
        return int(EarlyStopChecker.state_dict(self)["patience_count"])

    @property
    def best_score(self) -> torch.Tensor:
        return torch.tensor(EarlyStopChecker.state_dict(self)["best_value"])

    @property
    def state_key(self) -> str:
        return self._key(monitor=self.monitor, mode=self.mode)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._check_on_train_epoch_end is None:
            self._check_on_train_epoch_end = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._check_on_train_epoch_end:
            self._check(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._check_on_train_epoch_end and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._check(trainer)

    def _check(self, trainer: Any) -> None:
        value = trainer.callback_metrics.get(self.monitor)
        if trainer.fast_dev_run:
            return
        stops = value is not None and self.check(value)
        stops, lacks = agree.any_ranks([stops, value is None])  # it may be logged on some ranks only
        if lacks and self.strict:
            on = " on all ranks" if value is not None else ""
            raise not_logged("EarlyStopping", self.monitor, trainer.callback_metrics, on)
        if stops:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            if self.verbose and agree.is_rank0():
                logger.info("EarlyStopping: %s: %s", self.monitor, self.why)

    def state_dict(self) -> dict[str, Any]:
        names = ("wait_count", "stopped_epoch", "best_score", "patience")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stopped_epoch, self.patience = state_dict["stopped_epoch"], state_dict["patience"]
        seen = {"patience_count": state_dict["wait_count"], "best_value": state_dict["best_score"]}
        EarlyStopChecker.load_state_dict(self, seen)


class LearningRateMonitor(Callback):
    """Logs rates as "lr-SGD", with "/pg1" for one of several groups, "-1" for a class's second optimizer; or a schedule's name.

    Args:
        logging_interval: "step", "epoch", or None for the interval of each schedule.
        log_momentum, log_weight_decay: log these too, as "lr-SGD-momentum" and "lr-SGD-weight_decay".
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        require(logging_interval in ("step", "epoch", None), "logging_interval", "'step', 'epoch' or None", logging_interval)
        self.logging_interval, self.log_momentum, self.log_weight_decay = logging_interval, log_momentum, log_weight_decay
        self.lrs: dict[str, list[float]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.loggers:
            raise UsageError("LearningRateMonitor needs a logger: Trainer(logger=...).")
        self.lrs = {name: [] for name, *_ in self._named(trainer)}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.logging_interval != "epoch" and trainer.session.logs_now:
            self._log(trainer, "step")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.logging_interval != "step":
            self._log(trainer, "epoch")

    def _log(self, trainer: Any, interval: str) -> None:
        rates: dict[str, float] = {}
        for name, group, defaults, of_schedule in self._named(trainer):
            if self.logging_interval is None and of_schedule not in (interval, None):
                continue
            rates[name] = float(group["lr"])
            self.lrs.setdefault(name, []).append(rates[name])
            if self.log_momentum:
                rates[f"{name}-momentum"] = float(group["betas"][0] if "betas" in defaults else group.get("momentum", 0))
            if self.log_weight_decay:
                rates[f"{name}-weight_decay"] = float(group["weight_decay"])
        if rates:
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in rates.items()})
            trainer.session.write_metrics(rates, trainer.log_step)

    def _named(self, trainer: Any) -> list[tuple[str, dict[str, Any], dict[str, Any], str | None]]:
        """(name, group, the optimizer's defaults, its schedule's interval)."""
        scheduled = [(each.scheduler.optimizer, each) for each in trainer.lr_scheduler_configs]
        with_schedule = [optimizer for optimizer, _ in scheduled]
        every = [*scheduled, *((o, None) for o in trainer.optimizers if not any(o is other for other in with_schedule))]
        named, seen = [], Counter[str]()
        for optimizer, schedule in every:
            name = f"lr-{type(optimizer).__name__}"
            if schedule is not None and schedule.name is not None:
                name = schedule.name
            seen[name] += 1
            name = name if seen[name] == 1 else f"{name}-{seen[name] - 1}"
            groups = optimizer.param_groups
            for i, group in enumerate(groups):
                part = group.get("name", f"pg{i + 1}" if len(groups) > 1 else None)
                full = name if part is None else f"{name}/{part}"
                named.append((full, group, optimizer.defaults, schedule.interval if schedule is not None else None))
        return named


globals().update(accepted(DISPLAYS, __name__, Callback))
