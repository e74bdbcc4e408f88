"""The state of an optimizer over FullyShardedDataParallel, whole as the undivided optimizer has it, and back into shards.

Not torch's `full_optim_state_dict`: on CPUs torch 2.13 gives all tensors of a parameter's state the values of the last one.
A rank's piece of a parameter is a range of its elements, and ranges are in the order of the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from echelon.common.errors import CheckpointMismatchError, LayoutError
from echelon.compat.collect import collect
from echelon.compat.fairscale.nn.data_parallel.torch_fsdp import Piece, pieces, wrappers

__all__ = ["gathered", "sharded"]


def gathered(module: TorchFSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The whole state in host memory on the group's rank 0, by the parameters' numbers; None elsewhere. Collective.

    Of a wrapper in a group of one rank it is that of rank 0: "uncollected_local_ids" has the number of the wrapper.
    """
    group = _one_group(module)
    alone = {i for i, each in enumerate(wrappers(module)) if _is_alone(each, module)}
    held: dict[torch.Tensor, Piece] = {piece.parameter: piece for each in wrappers(module) for piece in pieces(each)}
    owner: dict[torch.Tensor, int] = {p.parameter: i for i, each in enumerate(wrappers(module)) for p in pieces(each)}
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    numbers: dict[torch.Tensor, int] = {p: i for i, p in enumerate(parameters)}
    state = {p: each for p, each in optimizer.state.items() if p in held}
    everyones = collect({numbers[p]: {k: _piece(p, v) for k, v in each.items()} for p, each in state.items()}, 0, group)
    if everyones is None:
        return None
    whole: dict[int, dict[str, Any]] = {}
    for parameter, number in numbers.items():
        those = everyones[:1] if owner.get(parameter) in alone else everyones
        if parts := [each[number] for each in those if each.get(number)]:
            shape = held[parameter].shape
            whole[number] = {key: _joined([part[key] for part in parts if key in part], shape) for key in parts[0]}
    groups = [{**each, "params": [numbers[p] for p in each["params"]]} for each in optimizer.param_groups]
    local = {number: owner.get(p) if number in whole else None for p, number in numbers.items()}
    return {"state": whole, "param_groups": groups, "param_id_map": local, "uncollected_local_ids": sorted(alone)}


def sharded(module: TorchFSDP, full: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a whole state, as an optimizer over the module's parameters loads it."""
    _one_group(module)
    held = {p.parameter: p for each in wrappers(module) for p in pieces(each)}
    order = [held[p] for p in module.parameters() if p in held]
    numbers = [number for group in full["param_groups"] for number in group["params"]]
    if len(numbers) != len(order):
        raise CheckpointMismatchError(f"the optimizer's state has {len(numbers)} parameters, this module {len(order)}.")
    state = {}
    for number, piece in zip(numbers, order, strict=True):
        given = full["state"].get(number)
        if given and piece.parameter.numel():
            state[number] = {key: _cut(value, piece) for key, value in given.items()}
    return {"state": state, "param_groups": [dict(group) for group in full["param_groups"]]}


def _is_alone(wrapper: TorchFSDP, around: TorchFSDP) -> bool:
    """Whether every rank has another state of it, as of an expert: the first rank's stands for all."""
    return wrapper.world_size == 1 < around.world_size


def _one_group(module: TorchFSDP) -> dist.ProcessGroup | None:
    groups = {id(m.process_group): m.process_group for m in wrappers(module) if not _is_alone(m, module)}
    if len(groups) > 1:
        raise LayoutError("an optimizer's state over several process groups: save it with echelon.DistributedCheckpointSaver.")
    return next(iter(groups.values()))


def _piece(parameter: torch.Tensor, value: Any) -> Any:
    """What there is for each element, apart from what there is once: a list of one tensor."""
    per_element = isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == parameter.numel()
    return [value.flatten()] if per_element else value


def _joined(parts: list[Any], shape: torch.Size) -> Any:
    if isinstance(parts[0], list):
        return torch.cat([part[0] for part in parts]).view(shape)
    return parts[0]


def _cut(value: Any, piece: Piece) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != piece.shape or not value.dim():
        return value.clone()
    part = value.flatten()[piece.start : piece.start + piece.parameter.numel()]
    return part.clone().view(piece.parameter.shape)  # which is whole where one rank has all
