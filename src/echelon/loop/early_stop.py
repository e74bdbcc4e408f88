"""Whether a monitored number has stopped improving."""

from __future__ import annotations

import math
from typing import Any, Literal

from echelon.common.arguments import flags
from echelon.common.errors import CallbackError, require
from echelon.common.numbers import number, whole

__all__ = ["EarlyStopChecker"]


class EarlyStopChecker:
    """Sees a number at each check and says when to stop: without improvement for `patience` checks, or beyond a threshold.

    Keep it as an attribute of the unit if a run that is resumed must remember the best value: it is then part of a checkpoint.

    Args:
        mode: "min" if smaller is better, "max" if greater.
        patience: checks in a row without improvement, after which to stop; 0 stops at the first.
        min_delta: what counts as improvement: more than so much better than the best; 0 or more.
        check_finite: stop at nan and infinity; False counts them as no improvement.
        threshold_mode: "abs": `min_delta` is in units of the number; "rel": a fraction of the best value's magnitude.
        stopping_threshold: stop when the number is better than this: it is good enough.
        divergence_threshold: stop when the number is worse than this.
    Attributes:
        why: it said that it is time to stop, if it did at the latest check.
        is_restored_stop: it was restored from a run that it has stopped for lack of improvement, and has checked nothing since.
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
        require(mode in ("min", "max"), "mode", "'min' or 'max'", mode)
        require(threshold_mode in ("abs", "rel"), "threshold_mode", "'abs' or 'rel'", threshold_mode)
        patience = whole("patience", patience, at_least=0)
        number("min_delta", min_delta, "a number of at least 0", lambda delta: delta >= 0)
        flags(check_finite=check_finite)
        for name, threshold in (("stopping_threshold", stopping_threshold), ("divergence_threshold", divergence_threshold)):
            if threshold is not None:
                number(name, threshold, "a number or None")
        self.mode, self.patience, self.min_delta, self.check_finite = mode, patience, min_delta, check_finite
        self.threshold_mode = threshold_mode
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self.is_restored_stop, self.why = False, ""
        self._patience_count = 0
        self._best_value = math.inf if self.mode == "min" else -math.inf

    def check(self, val: Any) -> bool:
        """Take in the number, any single one (a tensor, too); True if it is time to stop.

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
        # Of the magnitude: a loss that is negative must also become better, not worse, by a fraction.
        needed = self.min_delta * (abs(best) if self.threshold_mode == "rel" else 1.0)
        gain = best - value if self.mode == "min" else value - best
        return gain > needed

    def state_dict(self) -> dict[str, Any]:
        return {"patience_count": self._patience_count, "best_value": self._best_value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._patience_count, self._best_value = int(state_dict["patience_count"]), float(state_dict["best_value"])
        self.is_restored_stop = self._patience_count > 0 and self._patience_count >= self.patience
