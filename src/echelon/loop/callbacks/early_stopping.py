"""Stop training when a number no longer improves."""

from __future__ import annotations

from typing import Any, Literal

from echelon.common.errors import CallbackError, UsageError, require
from echelon.common.numbers import whole
from echelon.loop.callback import Callback
from echelon.loop.early_stop import EarlyStopChecker
from echelon.loop.records.monitored import Unknown, mode_of, number
from echelon.loop.state import State

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """Stops all ranks together when a number no longer improves: `EarlyStopping("accuracy", mode="max", patience=3)`.

    The number is what `state.log` was given under that name, over all ranks; or an attribute of the unit, such as AutoUnit's
    `eval_loss`, of which rank 0's counts. Each check is a small message between the ranks, and on a GPU makes the host wait.

    Args:
        monitored_attr: the number's name, as it was logged or as in metrics.jsonl ("eval_accuracy"), or the attribute's.
        early_stop_checker: decides, in place of `mode`, `patience` and `min_delta`, with more thresholds. As an attribute of the
            unit, too, it remembers across a resume; what they say is remembered in any case.
        interval: check after every "step" or "epoch".
        phase: of "train" or "eval". By default "eval" in a run with evaluations; with a checker "train".
        interval_freq: check at every n-th of these.
        mode: "min" if less is better, or "max"; by default as the name says, such as "accuracy" or "eval_loss".
        patience: checks in a row without improvement, after which to stop.
        min_delta: what counts as improvement: more than so much better than the best.
    Raises:
        UsageError: on all ranks, when there is no number of that name, with the names that there are.
    """

    refusal: type[UsageError] = CallbackError

    meets = True

    def __init__(
        self,
        monitored_attr: str,
        early_stop_checker: EarlyStopChecker | None = None,
        interval: Literal["step", "epoch"] = "epoch",
        phase: Literal["train", "eval"] | None = None,
        interval_freq: int = 1,
        *,
        mode: Literal["min", "max"] | None = None,
        patience: int | None = None,
        min_delta: float | None = None,
    ) -> None:
        require(interval in ("step", "epoch"), "interval", "'step' or 'epoch'", interval)
        require(phase in ("train", "eval", None), "phase", "'train' or 'eval'", phase)
        is_name = isinstance(monitored_attr, str) and monitored_attr != ""
        require(is_name, "monitored_attr", "the name of a number that is logged, or of an attribute", monitored_attr)
        self.remembers = early_stop_checker is None
        if early_stop_checker is None:
            mode = mode_of(monitored_attr, mode)
            if mode is None:
                raise CallbackError(
                    f"mode must be 'min' or 'max' for {monitored_attr!r}, got neither, and the name does not say it."
                )
            early_stop_checker = EarlyStopChecker(mode, 3 if patience is None else patience, min_delta or 0.0)
            phase = "train" if phase is None and interval == "step" else phase
        else:
            decides = callable(getattr(early_stop_checker, "check", None))
            require(
                decides, "early_stop_checker", "an EarlyStopChecker, or none with mode=... and patience=...", early_stop_checker
            )
            given = {"mode": mode, "patience": patience, "min_delta": min_delta}
            twice = [name for name, value in given.items() if value is not None]
            require(not twice, "early_stop_checker", f"left out with {', '.join(twice)}, which it has itself", early_stop_checker)
            phase = phase or "train"
        interval_freq = whole("interval_freq", interval_freq, at_least=1)
        self.monitored_attr, self.checker = monitored_attr, early_stop_checker
        self.interval, self.phase, self.interval_freq = interval, phase, interval_freq
        self.may_stop = interval == "step" and phase == "train"
        self.meets_in_steps = interval == "step" and phase == "eval"

    def on_train_start(self, state: State, unit: Any) -> None:
        if self.remembers and unit.restored_from is not None and (seen := self._memory(unit).get(self.monitored_attr)):
            self.checker.load_state_dict({"patience_count": seen[0], "best_value": seen[1]})
        if getattr(self.checker, "is_restored_stop", False) is True:  # else each restart would train one more epoch
            self._stop(state, "this was so before the run was restored, and nothing more is trained. A greater patience goes on")

    def on_train_step_end(self, state: State, unit: Any) -> None:
        if self.phase == "train" and self.interval == "step":
            self._check(state, unit, unit.train_progress.num_steps_completed)

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        if self._phase_in(state) == "train" and self.interval == "epoch":
            self._check(state, unit, unit.train_progress.num_epochs_completed)

    def on_eval_step_end(self, state: State, unit: Any) -> None:
        if self.phase == "eval" and self.interval == "step":
            self._check(state, unit, unit.eval_progress.num_steps_completed)

    def on_eval_epoch_end(self, state: State, unit: Any) -> None:
        if self._phase_in(state) == "eval" and self.interval == "epoch":
            self._check(state, unit, unit.eval_progress.num_epochs_completed)

    def _phase_in(self, state: State) -> str:
        return self.phase or ("eval" if state.eval_state is not None else "train")

    def _memory(self, unit: Any) -> dict[str, list[float]]:
        found: dict[str, list[float]] = unit.train_progress.early_stopping
        return found

    def _check(self, state: State, unit: Any, count: int) -> None:
        if count % self.interval_freq:
            return
        if self.interval == "epoch" and state.settle_logged is not None:
            state.settle_logged()
        try:
            value = self._number(state, unit)
        except Unknown as error:
            raise self.refusal(f"early stopping monitors {self.monitored_attr!r}, but {error}.") from None
        # Every rank's checker sees the same number, so that all remember the same.
        stops = self.checker.check(value)
        if self.remembers:
            said = self.checker.state_dict()
            self._memory(unit)[self.monitored_attr] = [said["patience_count"], said["best_value"]]
        if stops:
            self._stop(state, getattr(self.checker, "why", "") or f"{value:g}")

    def _stop(self, state: State, why: str) -> None:
        state.stop()
        if state.recorder is not None:
            state.recorder.event("early_stop", name=self.monitored_attr, why=why)

    def _number(self, state: State, unit: Any) -> float:
        return number(self.monitored_attr, state, unit, self._phase_in(state))[0]
