"""Optimizers that step by another one, which they hold: timm's Lookahead, SAM. Its state is a part of theirs.

The state of a parameter is that of the outer one, with the inner one's as a dict in it. Without it moments would begin anew after
a restart, in silence, as neither `outer.state` nor, often, `outer.state_dict()` has them
(tests/checkpoint/test_further_state.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["hooked", "inner_of", "linked", "put_inside", "state_of", "without_inner"]

_INNER = "~inner"  # no name of a parameter's state


def hooked(optimizer: torch.optim.Optimizer) -> None:
    """Have it call hooks around its steps: one that leaves out `Optimizer.__init__`, as timm's Lookahead does, calls none.

    What torch does after unpickling adds what is missing, and changes nothing where all is there.
    """
    torch.optim.Optimizer.__setstate__(optimizer, {"defaults": getattr(optimizer, "defaults", {})})


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The one that it holds for the same parameters."""
    held = [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer) and each is not optimizer]
    own_ids = {id(p) for group in optimizer.param_groups for p in group["params"]} if held else set()
    return next((each for each in held if any(id(p) in own_ids for group in each.param_groups for p in group["params"])), None)


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    """A parameter's, with that of the optimizer inside."""
    own: Mapping[str, Any] = optimizer.state.get(parameter, {})
    inner = inner_of(optimizer)
    if inner is None or inner.state is optimizer.state or not (further := state_of(inner, parameter)):
        return own
    return {**own, _INNER: further}


def without_inner(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the outer optimizer loads."""
    return {key: value for key, value in state.items() if key != _INNER}


def linked(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Before it loads, which puts others in the place of its groups and its state.

    Returns:
        what gives these to the optimizer inside again, where both had the same.
    """
    inner = inner_of(optimizer)
    if inner is None:
        return lambda: None
    same = [name for name in ("param_groups", "state") if vars(optimizer).get(name) is vars(inner).get(name)]
    further, loaded = linked(inner), vars(optimizer)

    def link() -> None:
        for name in same:
            vars(inner)[name] = loaded[name]
        further()

    return link


def put_inside(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
    """A parameter's state, as it was saved, into the optimizers inside."""
    inner = inner_of(optimizer)
    if inner is not None and _INNER in state:
        inner.state[parameter] = without_inner(state[_INNER])
        put_inside(inner, parameter, state[_INNER])
