"""The order in which DistributedDataParallel adds gradients, the same after a resume as it was before.

After its first backward pass it sorts gradients into other buckets, in the order in which that pass made them; a resumed
process would begin with the unsorted ones once more. A ring of three ranks or more adds an element's terms in an order that
depends on its place in a bucket, so that the first update after a resume would differ in its last bits. So the order of the
first pass is noted, travels in the checkpoint, and is played back through a backward pass that computes nothing.

With `find_unused_parameters` or `static_graph` torch has other rules, which are left alone. A communication hook with a state of
its own sees one all-reduce of zeros more. Tested with torch 2.13.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.parallel.patching import part_for_now
from echelon.parallel.prepared import Extras

__all__ = ["BucketOrder"]

# Two ranks add two numbers, in either order alike.
_ORDER_MATTERS_FROM = 3

_orders: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()


class BucketOrder(Extras):
    """The order of a wrapper's first backward pass that reduces: the names of its parameters."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module

    def keep(self) -> None:
        if _is_sorted_later(self._module) and self._module not in _orders:
            _Listener(self._module)

    def state_dict(self) -> dict[str, Any]:
        order = _orders.get(self._module)
        is_known = order is not None and len(order) == len(_trained(self._module))
        return {"reduction_order": order} if is_known else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the module reduce as if it had made gradients in this order once. Collective; clears gradients."""
        module, order = self._module, state_dict.get("reduction_order", ())
        if _is_sorted_later(module) and module not in _orders and sorted(order) == sorted(_trained(module)):
            _backward(module, order)
            _orders[module] = list(order)


def _is_sorted_later(module: nn.Module) -> bool:
    return (
        isinstance(module, DistributedDataParallel)
        and not module.find_unused_parameters
        and not module.static_graph
        and dist.get_world_size(module.process_group) >= _ORDER_MATTERS_FROM
    )


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class _Listener:
    """Hears of every gradient of one backward pass."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        trained = _trained(module)
        self._missing = set(trained)
        _orders[module] = []
        self._hooks = [p.register_post_accumulate_grad_hook(lambda _, name=name: self._hear(name)) for name, p in trained.items()]

    def _hear(self, name: str) -> None:
        module = self._module()
        if module is None or not module.require_backward_grad_sync or name not in self._missing:
            return
        self._missing.remove(name)
        _orders[module].append(name)
        if not self._missing:
            for hook in self._hooks:
                hook.remove()


class _Sum(nn.Module):
    """A loss whose gradients become ready in a given order, and are zero."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._parameters_in_order = tuple(parameters)  # a tuple: they are not this module's own

    def forward(self, start: torch.Tensor) -> torch.Tensor:
        total = start
        for parameter in reversed(self._parameters_in_order):  # what was computed last has its gradient first
            some = parameter.sum() * 0
            total = total + (some.real if some.is_complex() else some).to(total.dtype)
        return total


def _backward(module: DistributedDataParallel, order: Sequence[str]) -> None:
    trained = _trained(module)
    parameters = [trained[name] for name in order]
    with part_for_now(module, "module", _Sum(parameters)), torch.enable_grad():
        module(torch.zeros((), device=parameters[0].device)).backward()
    for parameter in parameters:
        parameter.grad = None
