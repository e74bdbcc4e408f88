"""Metrics that are the same number on any number of ranks: sums and counts are added up first, and the mean divided once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from echelon.world.agree import control_group, is_joined

__all__ = ["Mean", "load_share", "share_of"]


class Mean:
    """A weighted mean over all ranks, which may have seen different numbers of updates.

    `update` is local and does not wait for a device; `compute` is collective.

    Attributes:
        is_empty: at the latest `compute`, no rank had added anything.
    """

    def __init__(self) -> None:
        self.is_empty = True
        self._sum: Any = 0.0
        self._weight: Any = 0.0

    def update(self, value: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Add a mean over `weight` samples. A weight of zero adds nothing, not even a nan."""
        if isinstance(weight, (int, float)) and weight == 0:
            return
        if isinstance(value, torch.Tensor):
            value = value.detach().double()
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().double()  # a sum of many weights would not be exact in float32
            value = torch.where(weight == 0, 0.0, value)
        self._sum = self._sum + value * weight
        self._weight = self._weight + weight

    def compute(self) -> float:
        """The mean over all ranks; nan if nothing was added. Every rank must call it."""
        total = torch.tensor([float(self._sum), float(self._weight)], dtype=torch.float64)
        if is_joined():
            dist.all_reduce(total, group=control_group())
        value, weight = total.tolist()
        self.is_empty = weight == 0
        return value / weight if weight else float("nan")

    def reset(self) -> None:
        self._sum = self._weight = 0.0

    def state_dict(self) -> dict[str, Any]:
        """This rank's share."""
        return {"sum": float(self._sum), "weight": float(self._weight)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sum, self._weight = state_dict["sum"], state_dict["weight"]


def share_of(metric: Any) -> dict[str, Any]:
    """This rank's share of a metric: all that it has added so far."""
    persistent = getattr(metric, "persistent", None)
    if callable(persistent):
        persistent(True)  # without it, torchmetrics' state_dict is empty
    state: dict[str, Any] = metric.state_dict()
    return state


def load_share(metric: Any, state: dict[str, Any]) -> None:
    """Replace this rank's share of a metric by `state`."""
    if callable(getattr(metric, "persistent", None)):
        metric.reset()  # drops the computed value that torchmetrics cache
    metric.load_state_dict(state)
