"""Whether a unit's losses and weights are right for parts of sequences: its own code is asked, and nothing stays of that."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.parallel.prepared import PartsCheck

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["check_parts"]


def check_parts(check: PartsCheck, unit: Any, state: State, batch: Any) -> None:
    """Of the first batch of a unit whose `prepared` has a check. Collective.

    Raises:
        UsageError: on all ranks, as `PartsCheck.check_parts` says.
    """

    def compute(data: Any) -> Any:
        with unit.autocast():
            return unit.compute_loss(state, data)[0]

    with _undone(unit):
        check.check_parts(batch, unit.weight, partial(unit.through_stages, state, compute), unit.computes.dtype)


@contextlib.contextmanager
def _undone(unit: Any) -> Iterator[None]:
    """What `compute_loss` counts and collects in its unit, or moves in another module, such as a teacher, is as before."""
    attributes, share = dict(vars(unit)), unit.prepared.batches.share
    contents = [(value, value.copy()) for value in attributes.values() if type(value) in (list, dict, set, deque)]
    trained = set(unit.prepared.unwrapped.state_dict(keep_vars=True).values())
    others = {t for each in _modules_in(attributes.values()) for t in each.state_dict(keep_vars=True).values()}
    own = {t for t in attributes.values() if type(t) is torch.Tensor and not t.requires_grad}
    tensors = [(t, t.detach().clone()) for t in own | (others - trained) if isinstance(t, torch.Tensor)]
    try:
        yield
    finally:
        now = vars(unit)
        for name in now.keys() - attributes.keys():
            del now[name]
        now.update(attributes)
        for value, before in contents:
            if value != before:
                value.clear()
                value.extend(before) if isinstance(value, (list, deque)) else value.update(before)
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
