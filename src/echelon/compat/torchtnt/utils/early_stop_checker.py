"""torchtnt.utils.early_stop_checker: echelon's, computed and saved as tensors."""

from __future__ import annotations

from typing import Any, Literal

import torch

from echelon.common.errors import UsageError
from echelon.loop.callbacks import early_stopping

__all__ = ["EarlyStopChecker"]


class EarlyStopChecker(early_stopping.EarlyStopChecker):
    """As `echelon.callbacks.EarlyStopChecker`, in TorchTNT's types: thresholds, `min_delta` (negative in "min" mode) and the best
    value are tensors of one element, and numbers are compared in float32, so that 0.7 is 0.1 less than 0.8."""

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
        if mode not in ("min", "max"):
            raise UsageError(f"`mode` can be ('min', 'max'). Got `{mode}`")
        if min_delta < 0:
            raise UsageError(f"`min_delta` must be greater than or equal to 0. Got {min_delta}`")
        if threshold_mode not in ("abs", "rel"):
            raise UsageError(f"`threshold_mode` can be ('abs', 'rel'),Got `{threshold_mode}`")
        super().__init__(mode, patience, min_delta, check_finite, threshold_mode, stopping_threshold, divergence_threshold)
        self.min_delta: Any = torch.tensor([min_delta if mode == "max" else -min_delta], dtype=torch.float32)
        self.stopping_threshold: Any = _one(stopping_threshold)
        self.divergence_threshold: Any = _one(divergence_threshold)

    def reset(self) -> None:
        super().reset()
        self._best_value: Any = torch.tensor([self._best_value])

    def check(self, val: Any) -> bool:
        """Take in the number; True if it is time to stop.

        Raises:
            UsageError, a ValueError: a tensor with more or fewer elements than one.
        """
        if isinstance(val, torch.Tensor) and val.numel() != 1:
            raise UsageError(f"Expected tensor with only 1 element, but input has number of elements = {val.numel()}")
        value = val if isinstance(val, torch.Tensor) else torch.tensor([float(val)])
        return self._reason(value.detach()) is not None

    def _reason(self, value: Any) -> str | None:
        if self.check_finite and not torch.isfinite(value):
            return "not finite"
        if self.stopping_threshold is not None and self._better(value, self.stopping_threshold.to(value.device)):
            return "good enough"
        if self.divergence_threshold is not None and self._better(self.divergence_threshold.to(value.device), value):
            return "too bad"
        if self._improves(value):
            self._best_value, self._patience_count = value.clone(), 0
            return None
        self._patience_count += 1
        return "no improvement" if self._patience_count >= self.patience else None

    def _improves(self, value: Any) -> bool:
        best, needed = self._best_value.to(value.device), self.min_delta.to(value.device)
        if self.threshold_mode == "rel":
            needed = needed * (best.abs() if torch.isfinite(best) else 0.0)
        return bool(self._better(value - needed, best))

    def state_dict(self) -> dict[str, Any]:
        return {"patience_count": self._patience_count, "best_value": self._best_value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict["best_value"]
        self._patience_count = int(state_dict["patience_count"])
        self._best_value = best.detach().clone() if isinstance(best, torch.Tensor) else torch.tensor([float(best)])


def _one(value: float | None) -> torch.Tensor | None:
    return None if value is None else torch.tensor([value], dtype=torch.float32)
