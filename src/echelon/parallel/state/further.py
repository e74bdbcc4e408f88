"""What an optimizer's state has besides that of its parameters and their options, such as a count of its own steps.

torch's `state_dict()` keeps what lies in `optimizer.state` under other keys than parameters; a class or a hook may add keys
beside "state" and "param_groups". Both are plain values and whole tensors, equal on all ranks: where they differ, rank 0's count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from echelon.common.errors import CheckpointError
from echelon.parallel.shards import is_split
from echelon.world import agree

__all__ = ["FURTHER", "Further", "further_state", "given_back"]

# Its key in a checkpoint, beside those of the parameters.
FURTHER = "further"

# {"state": by key, "dict": by key, "off_cpu": paths of the tensors that lay on an accelerator}
Further = dict[str, Any]

_BY_TENSORS = object()  # stands for what has a tensor for a key

_REMEDY = (
    "Keep what belongs to a parameter in optimizer.state[parameter], which is saved by the parameter's name under any layout; "
    "elsewhere plain values and whole tensors by names, which are the same on every rank."
)


def further_state(optimizer: torch.optim.Optimizer, *, is_divided: bool = False) -> Further:
    """As it is now; empty if there is nothing.

    Args:
        is_divided: each rank has that of the parameters which it owns. Collective then.
    Raises:
        CheckpointError: what no checkpoint can give back.
    """
    further, problem = _taken(optimizer)
    if is_divided:
        agree.raise_on_all(problem, CheckpointError)
        kinds = (f"{path} {tuple(v.shape)}" if isinstance(v, torch.Tensor) else path for path, v in _leaves(further))
        told = agree.kinds(sorted(kinds))
        if len(told) > 1:
            problem = (
                f"{type(optimizer).__name__}.state_dict() must hold the same on every rank besides the state of the parameters "
                f"that it owns, got ranks with other things at {min(set(told[0]).symmetric_difference(*told[1:]))}. {_REMEDY}"
            )
    if problem is not None:
        raise CheckpointError(problem)
    off_cpu = [path for path, value in _leaves(further) if isinstance(value, torch.Tensor) and value.device.type != "cpu"]
    return further | {"off_cpu": off_cpu} if off_cpu else further


def _taken(optimizer: torch.optim.Optimizer) -> tuple[Further, str | None]:
    """What there is, and what is wrong with it."""
    name, told = type(optimizer).__name__, _told(optimizer)
    if not isinstance(told, Mapping):
        return {}, f"{name}.state_dict() must give a dict, got a {type(told).__name__}. {_REMEDY}"
    numbers = [key for key in optimizer.state if isinstance(key, int)]
    if numbers:
        return {}, f"the keys of {name}.state must be parameters and names, got {numbers[0]}. {_REMEDY}"
    state = told.get("state")
    found = {
        # Numbers stand for parameters there, whose state is saved by name.
        "state": {k: v for k, v in state.items() if not isinstance(k, int)} if isinstance(state, Mapping) else {},
        "dict": {k: v for k, v in told.items() if k not in ("state", "param_groups")},
    }
    for path, value in _leaves(found):
        if value is _BY_TENSORS or is_split(value):
            got = "a dict by tensors" if value is _BY_TENSORS else "a part of a tensor"
            return {}, f"{name}.state_dict() must hold plain values and whole tensors, got {got} at {path}. {_REMEDY}"
    return found if found["state"] or found["dict"] else {}, None


def given_back(optimizer: torch.optim.Optimizer, saved: Any) -> Further:
    """What the optimizer is to load: what was saved; what an earlier echelon has not saved stays as it is."""
    now = further_state(optimizer)
    if not isinstance(saved, Mapping):
        saved = {}
    paths = set(saved.get("off_cpu", ()))
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    return {part: {**now.get(part, {}), **_placed(saved.get(part, {}), part, paths, device)} for part in ("state", "dict")}


def _told(optimizer: torch.optim.Optimizer) -> Any:
    """Its `state_dict()`, which torch refuses to make where a parameter has a state and is in no group any more."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    dropped = {p: each for p, each in optimizer.state.items() if isinstance(p, torch.Tensor) and id(p) not in mine}
    for parameter in dropped:
        del optimizer.state[parameter]
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state.update(dropped)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What is no container, by where it lies."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(key, torch.Tensor):
                yield path.removeprefix("dict."), _BY_TENSORS
            else:
                yield from _leaves(each, _at(path, key))
    elif isinstance(value, list | tuple | deque):
        for number, each in enumerate(value):
            yield from _leaves(each, _at(path, number))
    else:
        yield path.removeprefix("dict."), value


def _placed(value: Any, path: str, paths: set[str], device: torch.device) -> Any:
    """What was just read, with the tensors at these paths on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device) if path.removeprefix("dict.") in paths else value
    if isinstance(value, MutableMapping):
        for key, each in value.items():
            value[key] = _placed(each, _at(path, key), paths, device)
    elif isinstance(value, list | deque):
        for number, each in enumerate(value):
            value[number] = _placed(each, _at(path, number), paths, device)
    elif type(value) is tuple:
        return tuple(_placed(each, _at(path, number), paths, device) for number, each in enumerate(value))
    return value


def _at(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
