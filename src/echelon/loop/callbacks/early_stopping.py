"""Stop training when a number of the unit no longer improves."""

from __future__ import annotations

import logging
from typing import Any, Literal

from echelon.contracts.errors import UsageError, require
from echelon.contracts.numbers import whole
from echelon.loop.callback import Callback
from echelon.loop.early_stop import EarlyStopChecker
from echelon.loop.state import State
from echelon.world import agree

__all__ = ["EarlyStopping"]

logger = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Checks an attribute of the unit, and stops all ranks together. Rank 0's value counts; give it one that is over all ranks,
    such as AutoUnit's `eval_loss`.

    Each check is a small message between the ranks, and makes the host wait for a number on a GPU.

    Args:
        monitored_attr: the attribute's name.
        early_stop_checker: decides. As an attribute of the unit, too, it remembers across a resume.
        interval: check after every "step" or "epoch".
        phase: of "train" or "eval".
        interval_freq: check at every n-th of these.
    Raises:
        UsageError: on all ranks, when rank 0's unit has no such attribute, or it is no single number.
    """

    refusal = UsageError

    meets = True

    def __init__(
        self,
        monitored_attr: str,
        early_stop_checker: EarlyStopChecker,
        interval: Literal["step", "epoch"] = "epoch",
        phase: Literal["train", "eval"] = "train",
        interval_freq: int = 1,
    ) -> None:
        require(interval in ("step", "epoch"), "interval", "'step' or 'epoch'", interval)
        require(phase in ("train", "eval"), "phase", "'train' or 'eval'", phase)
        require(isinstance(monitored_attr, str), "monitored_attr", "the name of an attribute", monitored_attr)
        decides = callable(getattr(early_stop_checker, "check", None))
        require(decides, "early_stop_checker", "an EarlyStopChecker", early_stop_checker)
        interval_freq = whole("interval_freq", interval_freq, at_least=1)
        self.monitored_attr, self.checker = monitored_attr, early_stop_checker
        self.interval, self.phase, self.interval_freq = interval, phase, interval_freq
        self.may_stop = interval == "step" and phase == "train"
        self.meets_in_steps = interval == "step" and phase == "eval"

    def on_train_start(self, state: State, unit: Any) -> None:
        if getattr(self.checker, "is_restored_stop", False) is True:  # else each restart would train one more epoch
            logger.info("the run was stopped early before it was restored: nothing more is trained. A greater patience goes on")
            state.stop()

    def on_train_step_end(self, state: State, unit: Any) -> None:
        if self.phase == "train" and self.interval == "step":
            self._check(state, unit, unit.train_progress.num_steps_completed)

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        if self.phase == "train" and self.interval == "epoch":
            self._check(state, unit, unit.train_progress.num_epochs_completed)

    def on_eval_step_end(self, state: State, unit: Any) -> None:
        if self.phase == "eval" and self.interval == "step":
            self._check(state, unit, unit.eval_progress.num_steps_completed)

    def on_eval_epoch_end(self, state: State, unit: Any) -> None:
        if self.phase == "eval" and self.interval == "epoch":
            self._check(state, unit, unit.eval_progress.num_epochs_completed)

    def _check(self, state: State, unit: Any, count: int) -> None:
        if count % self.interval_freq:
            return
        value = agree.from_rank0(lambda: self._read(unit))
        if isinstance(value, str):
            raise self.refusal(value)
        # Every rank's checker sees the same number, so that all remember the same.
        if self.checker.check(value):
            state.stop()

    def _read(self, unit: Any) -> float | str:
        """The monitored number, or an error message."""
        where, name = f"early stopping monitors {self.monitored_attr!r}", type(unit).__name__
        try:
            value = getattr(unit, self.monitored_attr)
        except AttributeError:
            return f"{where}, but {name} has no such attribute. Set it in __init__, and to its value before each check."
        except Exception as error:  # of a property: the other ranks must hear of it
            return f"{where}, but reading it failed: {type(error).__name__}: {error}"
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            return f"{where}, but {name}'s is no single number: {type(value).__name__} ({error})."
