"""LearningRateMonitor: log learning rates, momenta and weight decays, under Lightning's names."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import torch

from echelon.common.errors import UsageError, require
from echelon.compat.lightning.pytorch.callbacks.base import Callback

__all__ = ["LearningRateMonitor"]


class LearningRateMonitor(Callback):
    """Names are "lr-SGD", with "/pg1" for one of several groups and "-1" for a second optimizer of a class; or a schedule's name.

    Args:
        logging_interval: "step", "epoch", or None for the interval of each schedule.
        log_momentum, log_weight_decay: these as well, under "lr-SGD-momentum" and "lr-SGD-weight_decay".
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
        found: dict[str, float] = {}
        for name, group, defaults, of_schedule in self._named(trainer):
            if self.logging_interval is None and of_schedule not in (interval, None):
                continue
            found[name] = float(group["lr"])
            self.lrs.setdefault(name, []).append(found[name])
            if self.log_momentum:
                found[f"{name}-momentum"] = float(group["betas"][0] if "betas" in defaults else group.get("momentum", 0))
            if self.log_weight_decay:
                found[f"{name}-weight_decay"] = float(group["weight_decay"])
        if found:
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in found.items()})
            trainer.session.write_metrics(found, trainer.log_step)

    def _named(self, trainer: Any) -> list[tuple[str, dict[str, Any], dict[str, Any], str | None]]:
        """(name, group, the optimizer's defaults, its schedule's interval)."""
        scheduled = [(each.scheduler.optimizer, each) for each in trainer.lr_scheduler_configs]
        with_schedule = [optimizer for optimizer, _ in scheduled]
        every = [*scheduled, *((o, None) for o in trainer.optimizers if not any(o is other for other in with_schedule))]
        found, seen = [], Counter[str]()
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
                found.append((full, group, optimizer.defaults, schedule.interval if schedule is not None else None))
        return found
