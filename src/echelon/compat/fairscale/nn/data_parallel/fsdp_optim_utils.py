"""The state of an optimizer over FullyShardedDataParallel, whole by parameter name, and back into shards.

Not torch's `full_optim_state_dict`: on CPUs torch 2.13 gives all tensors of a parameter's state the values of the last one.
A rank's piece of a parameter is a range of its elements, and ranges are in the order of the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from echelon.compat.collect import collect
from echelon.contracts.errors import CheckpointMismatchError, UsageError
from echelon.world import agree

__all__ = ["gathered", "sharded"]

_PREFIX = "_fsdp_wrapped_module."


def gathered(module: TorchFSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The whole state in host memory on the group's rank 0; None elsewhere. Collective."""
    group = _one_group(module)
    names: dict[torch.Tensor, str] = {p: n.replace(_PREFIX, "") for n, p in module.named_parameters()}
    mine = {names[p]: {k: _piece(p, v) for k, v in state.items()} for p, state in optimizer.state.items() if p in names}
    with TorchFSDP.summon_full_params(module, writeback=False):
        shapes = {n.replace(_PREFIX, ""): p.shape for n, p in module.named_parameters()}
    everyones = collect(mine, 0, group)
    if everyones is None:
        return None
    state: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        parts = [each[name] for each in everyones if name in each]
        if parts:
            state[name] = {key: _joined([part[key] for part in parts], shape) for key in parts[0]}
    groups = [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def sharded(module: TorchFSDP, full: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a whole state, as an optimizer over the module's parameters loads it. Collective."""
    group = _one_group(module)
    rank = dist.get_rank(group)
    named = {n.replace(_PREFIX, ""): p for n, p in module.named_parameters()}
    sizes = agree.gather([p.numel() for p in named.values()], group)
    starts = dict(zip(named, (sum(each) for each in zip(*sizes[:rank], strict=True)) if rank else [0] * len(named), strict=True))
    state, groups, count = dict[int, Any](), list[dict[str, Any]](), 0
    for given in full["param_groups"]:
        numbers = list(range(count, count := count + len(given["params"])))
        groups.append({**given, "params": numbers})
        for number, name in zip(numbers, given["params"], strict=True):
            if name not in named:
                raise CheckpointMismatchError(f"the optimizer's state has a parameter {name!r}, which this module has not.")
            size = named[name].numel()
            if name in full["state"] and size:
                state[number] = {k: _cut(v, starts[name], size) for k, v in full["state"][name].items()}
    return {"state": state, "param_groups": groups}


def _one_group(module: TorchFSDP) -> dist.ProcessGroup | None:
    groups = {id(each): each for m in module.modules() if isinstance(m, TorchFSDP) for each in [m.process_group]}
    if len(groups) > 1:
        raise UsageError("an optimizer's state over several process groups: save it with echelon.DistributedCheckpointSaver.")
    return next(iter(groups.values()))


def _piece(parameter: torch.Tensor, value: Any) -> Any:
    """What there is for each element, apart from what there is once: a list of one tensor."""
    per_element = isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == parameter.numel()
    return [value.flatten()] if per_element else value


def _joined(parts: list[Any], shape: torch.Size) -> Any:
    if isinstance(parts[0], list):
        return torch.cat([part[0] for part in parts]).view(shape)
    return parts[0]


def _cut(value: Any, start: int, size: int) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value.flatten()[start : start + size].clone()
    return value.clone() if isinstance(value, torch.Tensor) else value
