"""Metrics that are the same number on any number of ranks: sums and counts are added up first, and the mean divided once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from echelon.world.agree import control_group, is_joined
from echelon.world.device import copy_data_to_device

__all__ = ["Mean", "join_shares", "load_share", "reset", "share_of"]

_COUNT, _REDUCTIONS = "_update_count", "_reductions"  # torchmetrics' own names


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
    parts = _parts(metric)
    if not parts:
        state: dict[str, Any] = metric.state_dict()
        return state
    shares = {name: {**part.metric_state, _COUNT: part.update_count} for name, part in parts.items()}
    return {**shares.pop("", {}), **shares}


def load_share(metric: Any, state: dict[str, Any]) -> None:
    """Replace this rank's share of a metric by `state`."""
    parts = _parts(metric)
    for name, part in parts.items():
        part.reset()  # drops the computed value that torchmetrics cache
        share = state.get(name, {}) if name else state
        if _COUNT in share:
            own = {key: value for key, value in share.items() if key in part.metric_state or key == _COUNT}
            vars(part).update(copy_data_to_device(own, part.device))
    if not parts or not any(_COUNT in each for each in (state, *state.values()) if isinstance(each, dict)):
        metric.load_state_dict(state)  # of an older checkpoint, if it is one of torchmetrics


def join_shares(metric: Any, shares: Sequence[dict[str, Any]]) -> bool:
    """Replace this rank's share of a metric by those of several ranks, or of none. False if the metric cannot join them."""
    reset(metric)
    for at, share in enumerate(shares):
        if at == 0:
            load_share(metric, share)
            continue
        other = copy.deepcopy(metric)
        load_share(other, share)
        mine, others = _parts(metric), _parts(other)
        try:
            for name, part in mine.items():
                if any(reduce is not None and reduce.__name__ == "dim_zero_mean" for reduce in vars(part)[_REDUCTIONS].values()):
                    return False  # it would be merged as if it were of a single update
                count = part.update_count + others[name].update_count
                part.merge_state(others[name])
                vars(part)[_COUNT] = count
            if not mine:
                metric.merge_state([other])  # as torcheval's
        except (AttributeError, RuntimeError, TypeError):
            return False
    return True


def reset(metric: Any) -> None:
    """Begin anew. A module of several metrics, as in compat/lightning, has no `reset` of its own."""
    for part in _parts(metric).values() or [metric]:
        part.reset()


def _parts(metric: Any) -> dict[str, Any]:
    """The metrics of torchmetrics that one consists of, by name. Their state_dict has neither states that are not persistent nor
    how often they were updated, by which `forward` weighs a mean so far.
    """
    modules = metric.named_modules() if isinstance(metric, torch.nn.Module) else ()
    # A collection's `metric_state` gives each part what it shares with others.
    return {name: part for name, part in modules if hasattr(part, "metric_state") and hasattr(part, "update_count")}
