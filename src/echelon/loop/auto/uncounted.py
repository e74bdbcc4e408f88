"""Passes that leave nothing behind: over padding on a rank without samples, and to check that losses fit a layout."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.loop.records.metrics import load_share, share_of
from echelon.parallel.ddp.sync_batchnorm import without_rows
from echelon.parallel.over_ranks import without_samples

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["attributes_kept", "check_parts", "forgetting", "standing_in", "uncounted"]

_METRIC = ("update", "compute", "reset")
_STATE = (torch.Tensor, list, dict, int, float, type(None))


@contextlib.contextmanager
def standing_in(unit: Any) -> Iterator[None]:
    """Context of the forward and backward pass over padding: batch norm's statistics and metrics ignore it."""
    with uncounted(unit), without_rows(unit.prepared.module), without_samples():
        yield


def uncounted(unit: Any) -> contextlib.AbstractContextManager[None]:
    """Context after which the metrics of the unit and of its module are as before."""
    return forgetting([*unit.tracked_metrics().values(), unit.prepared.unwrapped])


@contextlib.contextmanager
def forgetting(roots: Sequence[Any]) -> Iterator[None]:
    """Context after which these metrics, and the metrics inside these modules, are as before."""
    inner = [m for root in roots if isinstance(root, nn.Module) for m in root.modules()]
    counting = [m for m in inner if all(callable(getattr(m, name, None)) for name in _METRIC)]
    # Attributes, not state_dict(): making torchmetrics' states part of it would make the module's checkpoint hold them, too.
    before = [(m, {k: copy.deepcopy(v) for k, v in vars(m).items() if isinstance(v, _STATE)}) for m in counting]
    others = [metric for metric in roots if not isinstance(metric, nn.Module)]
    shares = [(metric, copy.deepcopy(share_of(metric))) for metric in others]
    try:
        yield
    finally:
        for metric, state in before:
            vars(metric).update(state)
        for metric, share in shares:
            load_share(metric, share)


# --- check that a unit's losses and weights are right for parts of sequences, by calling its code


def check_parts(unit: Any, state: State, batch: Any) -> None:
    """On the first batch, compare losses and weights of parts with those of the whole (`Batches.doubts`). Collective.

    Raises:
        UsageError: on all ranks, as `Batches.check_parts` says.
    """

    def compute(data: Any) -> Any:
        with unit.autocast():
            return unit.compute_loss(state, data)[0]

    with _undone(unit):
        unit.prepared.batches.check_parts(batch, unit.weight, partial(unit.through_stages, state, compute), unit.computes.dtype)


@contextlib.contextmanager
def attributes_kept(thing: Any, but: Collection[str] = ()) -> Iterator[None]:
    """Context after which an object's attributes, and the contents of lists, dicts and sets among them, are as before.

    Args:
        but: names of attributes that may change.
    """
    attributes = {name: value for name, value in vars(thing).items() if name not in but}
    contents = [(value, value.copy()) for value in attributes.values() if type(value) in (list, dict, set, deque)]
    try:
        yield
    finally:
        now = vars(thing)
        for name in [name for name in now if name not in attributes and name not in but]:
            del now[name]
        now.update(attributes)
        for value, before in contents:
            value.clear()
            value.extend(before) if isinstance(value, (list, deque)) else value.update(before)


@contextlib.contextmanager
def _undone(unit: Any) -> Iterator[None]:
    """Context after which the unit, and other modules such as a teacher, are as before `compute_loss` changed them."""
    attributes, share = dict(vars(unit)), unit.prepared.batches.share
    trained = set(unit.prepared.unwrapped.state_dict(keep_vars=True).values())
    others = {t for each in _modules_in(attributes.values()) for t in each.state_dict(keep_vars=True).values()}
    own = {t for t in attributes.values() if type(t) is torch.Tensor and not t.requires_grad}
    tensors = [(t, t.detach().clone()) for t in own | (others - trained) if isinstance(t, torch.Tensor)]
    try:
        with attributes_kept(unit):
            yield
    finally:
        with torch.no_grad():
            for tensor, before in tensors:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
        unit.prepared.batches.share = share


def _modules_in(values: Iterable[Any]) -> Iterator[nn.Module]:
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif type(value) in (list, tuple):
            yield from _modules_in(value)
        elif type(value) is dict:
            yield from _modules_in(value.values())
