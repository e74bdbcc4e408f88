"""Optimizers that hold an inner optimizer and step by it: timm's Lookahead, SAM. The inner state is saved within the outer one.

A parameter's state is the outer optimizer's, with the inner optimizer's as a dict in it. Otherwise moments would silently start
anew after a restart, as `outer.state` never has them, and `outer.state_dict()` often lacks them, too
(tests/checkpoint/test_further_state.py).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from echelon.parallel.patching import replace

__all__ = ["hooked", "inner_of", "linked", "put_inside", "state_of", "without_inner"]

_INNER = "~inner"  # a key that no optimizer uses in a parameter's state


def hooked(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer call step hooks. One that skips `Optimizer.__init__`, as timm's Lookahead does, calls none.

    `__setstate__`, which torch calls after unpickling, adds missing attributes and changes no existing ones; it has the class's
    `step` call the hooks, but not a `step` of the object's own, which a scheduler has put around the class's as it was before.
    """
    torch.optim.Optimizer.__setstate__(optimizer, {"defaults": getattr(optimizer, "defaults", {})})
    step = vars(optimizer).get("step")
    if step is not None and not getattr(step, "hooked", False):  # the mark is on what wraps a marked one, too

        @functools.wraps(step)
        def method(_: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            return step(*args, **options)

        calls_hooks = torch.optim.Optimizer.profile_hook_step(method)
        calls_hooks.hooked = True  # type: ignore[attr-defined]
        replace(optimizer, "step", "hooked", types.MethodType(calls_hooks, optimizer))


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The optimizer that it holds for the same parameters; None without one."""
    held = [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer) and each is not optimizer]
    own_ids = {id(p) for group in optimizer.param_groups for p in group["params"]} if held else set()
    return next((each for each in held if any(id(p) in own_ids for group in each.param_groups for p in group["params"])), None)


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    """A parameter's state, with that of the inner optimizer."""
    own: Mapping[str, Any] = optimizer.state.get(parameter, {})
    inner = inner_of(optimizer)
    if inner is None or inner.state is optimizer.state or not (further := state_of(inner, parameter)):
        return own
    return {**own, _INNER: further}


def without_inner(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a parameter's state that the outer optimizer loads."""
    return {key: value for key, value in state.items() if key != _INNER}


def linked(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Record whether outer and inner optimizer share `param_groups` and `state`. Call before a load, which replaces the outer's.

    Returns:
        a function that makes the inner optimizer share the outer's again.
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
    """Load a parameter's saved state into the inner optimizers."""
    inner = inner_of(optimizer)
    if inner is not None and _INNER in state:
        inner.state[parameter] = without_inner(state[_INNER])
        put_inside(inner, parameter, state[_INNER])
