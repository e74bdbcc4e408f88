"""Stop training when a number no longer improves."""

from __future__ import annotations

import math
from typing import Any, Literal

from echelon.common.arguments import Given
from echelon.common.errors import CallbackError, UsageError
from echelon.loop.callback import Callback
from echelon.loop.records import monitored
from echelon.loop.records.monitored import Unknown, mode_of
from echelon.loop.state import State

__all__ = ["EarlyStopping"]

_given = Given(CallbackError)


class EarlyStopping(Callback):
    """Stops all ranks together when a number no longer improves: `EarlyStopping("accuracy", mode="max", patience=3)`.

    The number was logged with `state.log` under that name, over all ranks; or it is an attribute of the unit, such as AutoUnit's
    `eval_loss`, and rank 0's value counts. Each check sends a small message between the ranks, and makes the host wait for a GPU.

    Args:
        monitored_attr: name of the number, as logged or as in metrics.jsonl ("eval_accuracy"), or of the attribute.
        early_stop_checker: decides in place of `mode`, `patience` and `min_delta`, and has more thresholds. To remember across a
            resume it must also be an attribute of the unit; `mode`, `patience` and `min_delta` need not.
        interval: check after every "step" or "epoch".
        phase: "train" or "eval". Default: "eval" in a run with evaluations; "train" with a checker.
        interval_freq: check at every n-th step or epoch.
        mode: "min" if a smaller number is better, or "max"; by default the name decides, such as "accuracy" or "eval_loss".
        patience: stop after this many checks in a row without improvement.
        min_delta: a number is an improvement if it is better than the best by more than this.
    Raises:
        UsageError: on all ranks: there is no number of that name. Lists the names that exist.
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
        _given.require(interval in ("step", "epoch"), "interval", "'step' or 'epoch'", interval)
        _given.require(phase in ("train", "eval", None), "phase", "'train' or 'eval'", phase)
        is_name = isinstance(monitored_attr, str) and monitored_attr != ""
        _given.require(is_name, "monitored_attr", "the name of a logged number, or of an attribute", monitored_attr)
        self.remembers = early_stop_checker is None
        if early_stop_checker is None:
            mode = mode_of(monitored_attr, mode)
            if mode is None:
                raise CallbackError(
                    f"mode must be 'min' or 'max' for {monitored_attr!r}, got none, and the name does not tell which."
                )
            early_stop_checker = EarlyStopChecker(mode, 3 if patience is None else patience, min_delta or 0.0)
            phase = "train" if phase is None and interval == "step" else phase
        else:
            decides = callable(getattr(early_stop_checker, "check", None))
            _given.require(
                decides, "early_stop_checker", "an EarlyStopChecker, or none with mode=... and patience=...", early_stop_checker
            )
            given = {"mode": mode, "patience": patience, "min_delta": min_delta}
            twice = [name for name, value in given.items() if value is not None]
            _given.require(
                not twice, "early_stop_checker", f"left out with {', '.join(twice)}, which it replaces", early_stop_checker
            )
            phase = phase or "train"
        interval_freq = _given.whole("interval_freq", interval_freq, at_least=1)
        self.monitored_attr, self.checker = monitored_attr, early_stop_checker
        self.interval, self.phase, self.interval_freq = interval, phase, interval_freq
        self.may_stop = interval == "step" and phase == "train"
        self.meets_in_steps = interval == "step" and phase == "eval"

    def on_train_start(self, state: State, unit: Any) -> None:
        if self.remembers and unit.restored_from is not None and (seen := self._memory(unit).get(self.monitored_attr)):
            self.checker.load_state_dict({"patience_count": seen[0], "best_value": seen[1]})
        if getattr(self.checker, "is_restored_stop", False) is True:  # else each restart would train one more epoch
            why = "the run had stopped for it before it was restored; nothing more is trained. A greater patience continues"
            self._stop(state, unit, why)

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
        memory: dict[str, list[float]] = unit.train_progress.early_stopping
        return memory

    def _check(self, state: State, unit: Any, count: int) -> None:
        if count % self.interval_freq:
            return
        if self.interval == "epoch" and state.settle_logged is not None:
            state.settle_logged()
        try:
            value = self._number(state, unit)
        except Unknown as error:
            raise self.refusal(f"early stopping monitors {self.monitored_attr!r}, but {error}.") from None
        # Every rank's checker sees the same number, so all checkers stay the same.
        stops = self.checker.check(value)
        if self.remembers:
            checker_state = self.checker.state_dict()
            self._memory(unit)[self.monitored_attr] = [checker_state["patience_count"], checker_state["best_value"]]
        if stops:
            self._stop(state, unit, getattr(self.checker, "why", "") or f"{value:g}")

    def _stop(self, state: State, unit: Any, why: str) -> None:
        state.stop()
        progress = getattr(unit, "train_progress", None)  # an EvalUnit has none
        state.event("early_stop", name=self.monitored_attr, why=why, step=getattr(progress, "num_updates_completed", None))

    def _number(self, state: State, unit: Any) -> float:
        return monitored.number(self.monitored_attr, state, unit, self._phase_in(state))[0]


# --- whether a monitored number has stopped improving


class EarlyStopChecker:
    """Gets a number at each check and tells when to stop: after `patience` checks without improvement, or beyond a threshold.

    If a resumed run must remember the best value, keep the checker as an attribute of the unit: it is then part of a checkpoint.

    Args:
        mode: "min" if smaller is better, "max" if greater.
        patience: stop after this many checks in a row without improvement; 0 stops at the first.
        min_delta: a number is an improvement if it is better than the best by more than this; 0 or more.
        check_finite: stop at nan and infinity; False counts them as no improvement.
        threshold_mode: "abs": `min_delta` is in units of the number; "rel": a fraction of the best value's magnitude.
        stopping_threshold: stop when the number is better than this: it is good enough.
        divergence_threshold: stop when the number is worse than this.
    Attributes:
        why: reason to stop, found at the latest check; "" if there is none.
        is_restored_stop: the checker was restored from a run that it had stopped for lack of improvement, and has not checked
            since.
    """

    def __init__(
        self,
        mode: Literal["min", "max"],
        patience: int,
        min_delta: float = 0.0,
        check_finite: bool = True,
        threshold_mode: Literal["abs", "rel"] = "abs",
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
    ) -> None:
        _given.require(mode in ("min", "max"), "mode", "'min' or 'max'", mode)
        _given.require(threshold_mode in ("abs", "rel"), "threshold_mode", "'abs' or 'rel'", threshold_mode)
        patience = _given.whole("patience", patience, at_least=0)
        _given.number("min_delta", min_delta, "a number of at least 0", lambda delta: delta >= 0)
        _given.flags(check_finite=check_finite)
        for name, threshold in (("stopping_threshold", stopping_threshold), ("divergence_threshold", divergence_threshold)):
            if threshold is not None:
                _given.number(name, threshold, "a number or None")
        self.mode, self.patience, self.min_delta, self.check_finite = mode, patience, min_delta, check_finite
        self.threshold_mode = threshold_mode
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.reset()

    def reset(self) -> None:
        """Forget all numbers so far."""
        self.is_restored_stop, self.why = False, ""
        self._patience_count = 0
        self._best_value = math.inf if self.mode == "min" else -math.inf

    def check(self, val: Any) -> bool:
        """Check a single number, or a tensor with one element. True if it is time to stop.

        Raises:
            UsageError: a tensor with more or fewer elements than one.
        """
        self.is_restored_stop = False
        if hasattr(val, "numel") and val.numel() != 1:
            raise CallbackError(f"the monitored value must be one number, got a tensor of {val.numel()}. Give its mean.")
        try:
            value = float(val)
        except (TypeError, ValueError):
            raise CallbackError(f"the monitored value must be one number, got {val!r}.") from None
        self.why = self._reason(value) or ""
        return bool(self.why)

    def _reason(self, value: float) -> str | None:
        if self.check_finite and not math.isfinite(value):
            return f"the value is {value}"
        if self.stopping_threshold is not None and self._better(value, self.stopping_threshold):
            return f"{value:g} is better than stopping_threshold {self.stopping_threshold:g}"
        if self.divergence_threshold is not None and self._better(self.divergence_threshold, value):
            return f"{value:g} is worse than divergence_threshold {self.divergence_threshold:g}"
        if self._improves(value):
            self._best_value, self._patience_count = value, 0
            return None
        self._patience_count += 1
        if self._patience_count < self.patience:
            return None
        return f"{value:g} does not improve on {self._best_value:g}, for {self._patience_count} checks in a row"

    def _better(self, value: float, than: float) -> bool:
        return value < than if self.mode == "min" else value > than

    def _improves(self, value: float) -> bool:
        best = self._best_value
        if not math.isfinite(best):
            return self._better(value, best)
        # A fraction of the magnitude, because a negative loss must also improve by it, not get worse.
        needed = self.min_delta * (abs(best) if self.threshold_mode == "rel" else 1.0)
        gain = best - value if self.mode == "min" else value - best
        return gain > needed

    def state_dict(self) -> dict[str, Any]:
        return {"patience_count": self._patience_count, "best_value": self._best_value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._patience_count, self._best_value = int(state_dict["patience_count"]), float(state_dict["best_value"])
        self.is_restored_stop = self._patience_count > 0 and self._patience_count >= self.patience
