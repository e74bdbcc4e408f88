"""Metrics that are the same number on any number of ranks: sums and counts are added up, means are divided once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from echelon.world.agree import control_group, is_joined

__all__ = ["Mean", "MeanOfAPhase", "load_share", "share_of"]


class Mean:
    """A weighted mean over all ranks, however many updates each has seen.

    `update` is local and does not wait for a device; `compute` is collective.

    Attributes:
        is_empty: whether no rank had added anything, at the latest `compute`.
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
            weight = weight.detach().double()  # a sum of many would not fit into fewer digits
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
    """What this rank has added to a metric so far."""
    persistent = getattr(metric, "persistent", None)
    if callable(persistent):
        persistent(True)  # torchmetrics leave it out of their state unless they are told
    state: dict[str, Any] = metric.state_dict()
    return state


def load_share(metric: Any, state: dict[str, Any]) -> None:
    """Make `state` all that this rank has added."""
    if callable(getattr(metric, "persistent", None)):
        metric.reset()  # torchmetrics keep the value that they computed last
    metric.load_state_dict(state)


class MeanOfAPhase:
    """Holds a mean outside of a unit's saved state: it is finished before a checkpoint can be taken."""

    def __init__(self) -> None:
        self.mean = Mean()
