"""EarlyStopping: end a run whose logged number has stopped improving."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

import torch

from echelon.common.errors import UsageError, require
from echelon.compat.lightning.pytorch.callbacks.base import Callback
from echelon.world import agree

__all__ = ["EarlyStopping"]

logger = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Stop after `patience` checks in a row without an improvement of more than `min_delta`.

    Args:
        monitor: a logged name. It is looked at after each epoch, or after each evaluation where `fit` has other intervals.
        strict: whether it is an error if it was not logged.
        check_finite: stop at nan and infinity.
        stopping_threshold, divergence_threshold: stop when the number is better than the one, or worse than the other.
        check_on_train_epoch_end: decides when to look, in place of the above.
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
        require(mode in ("min", "max"), "mode", "'min' or 'max'", mode)
        self.monitor, self.patience, self.verbose, self.mode, self.strict = monitor, patience, verbose, mode, strict
        self.min_delta = abs(min_delta) if mode == "max" else -abs(min_delta)
        self.check_finite = check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self.wait_count = self.stopped_epoch = 0
        self.best_score = torch.tensor(math.inf if mode == "min" else -math.inf)

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
        stops, why = (False, "") if value is None else self._judge(float(value))
        stops, lacks = agree.any_ranks([stops, value is None])  # it may be logged on some ranks alone
        if lacks and self.strict:
            known = ", ".join(trainer.callback_metrics) or "nothing"
            on = " on all ranks" if value is not None else ""
            raise UsageError(f"EarlyStopping monitors {self.monitor!r}, which was not logged{on}; logged were: {known}.")
        if stops:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
        if why and self.verbose and agree.is_rank0():
            logger.info("EarlyStopping: %s", why)

    def _judge(self, value: float) -> tuple[bool, str]:
        best = float(self.best_score)
        sign = -1 if self.mode == "min" else 1
        if self.check_finite and not math.isfinite(value):
            return True, f"{self.monitor} is {value}; the best was {best}"
        if self.stopping_threshold is not None and sign * value > sign * self.stopping_threshold:
            return True, f"{self.monitor} = {value} is beyond the threshold {self.stopping_threshold}"
        if self.divergence_threshold is not None and sign * value < sign * self.divergence_threshold:
            return True, f"{self.monitor} = {value} has diverged beyond {self.divergence_threshold}"
        if sign * (value - self.min_delta) > sign * best:
            self.best_score, self.wait_count = torch.tensor(value), 0
            return False, f"{self.monitor} improved to {value}"
        self.wait_count += 1
        return self.wait_count >= self.patience, f"{self.monitor} has not improved {self.wait_count} times; the best is {best}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count, self.stopped_epoch = state_dict["wait_count"], state_dict["stopped_epoch"]
        self.best_score, self.patience = torch.as_tensor(state_dict["best_score"]), state_dict["patience"]
