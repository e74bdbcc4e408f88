"""States of a FullyShardedDataParallel: this rank's part of the parameters, all ranks' parts joined, and an optimizer's state.

Keys and forms are FairScale's. A rank holds the range of each parameter that torch gives it, so parts are loaded on as many
ranks as saved them. A whole optimizer state has the undivided optimizer's form. torch's `full_optim_state_dict` is not used: on
CPUs, torch 2.13 gives all tensors of a parameter's state the values of the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from echelon.common.errors import CheckpointMismatchError, LayoutError
from echelon.compat.collect import collect
from echelon.compat.fairscale.torch_fsdp import (
    Piece,
    forget_whole,
    pieces,
    plain,
    shared_names,
    wrappers,
)

__all__ = ["consolidated", "gathered", "load_local_state", "local_metadata", "local_state", "sharded"]


class IncompatibleKeys(NamedTuple):
    """What `load_state_dict` of a module returns."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def local_state(module: TorchFSDP, prefix: str = "") -> dict[str, torch.Tensor]:
    """This rank's elements of each parameter, and the buffers."""
    local = {
        f"{prefix}{path}{piece.name}": piece.values.clone() for path, wrapper in _wrappers(module) for piece in pieces(wrapper)
    }
    # In mixed precision, buffers have low precision between forward passes.
    low = getattr(module, "low", None) is not None
    for name, buffer in _buffers(module):
        local[prefix + name] = buffer.detach().float() if low and buffer.is_floating_point() else buffer.detach()
    return local


@torch.no_grad()
def load_local_state(module: TorchFSDP, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> IncompatibleKeys:
    """Load what `local_state` returned on the same rank of as many ranks.

    Raises:
        RuntimeError: a tensor has another size; or, if `strict`, keys are missing or unexpected.
    """
    now, state = local_state(module), state_dict
    missing, unexpected = [k for k in now if k not in state], [k for k in state if k not in now]
    sizes = {k: (state[k].numel(), value.numel()) for k, value in now.items() if k in state}
    errors = [f"size mismatch for {k}: ({size},), not ({own},)" for k, (size, own) in sizes.items() if size != own]
    if strict:
        errors += [f"Missing key(s) in state_dict: {missing}"] * bool(missing)
        errors += [f"Unexpected key(s) in state_dict: {unexpected}"] * bool(unexpected)
    if errors:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t" + "\n\t".join(errors))
    for path, wrapper in _wrappers(module):
        for piece in pieces(wrapper):
            if (given := state.get(path + piece.name)) is not None:
                piece.values.copy_(given)
        forget_whole(wrapper)
    for name, buffer in _buffers(module):
        if name in state:
            buffer.copy_(state[name])
    return IncompatibleKeys(missing, unexpected)


def local_metadata(module: TorchFSDP) -> dict[str, Any]:
    """What `consolidated` needs to know about this rank's part."""
    rows = []
    for path, wrapper in _wrappers(module):
        parameters = {
            piece.name: {"names": [piece.name], "shapes": [piece.shape], "numels": [piece.shape.numel()], "padding": 0}
            for piece in pieces(wrapper)
        }
        rows.append(
            {
                "fsdp_path": path.removesuffix("."),
                "params": parameters,
                "no_broadcast_optim_state": bool(getattr(wrapper, "no_broadcast_optim_state", False)),
                "shared_param_info": shared_names(wrapper),
            }
        )
    return {"param_metadata": rows, "buffer_names": [name for name, _ in _buffers(module)]}


def consolidated(
    shard_weights: list[dict[str, torch.Tensor]],
    shard_metadata: list[dict[str, Any]],
    with_module_buffers: bool = True,
    strict: bool = True,
) -> dict[str, torch.Tensor]:
    """The state dict of the unwrapped module, from every rank's `local_state` and `local_metadata`; no process group is needed.

    Raises:
        ValueError: there are not as many weights as metadata, or none.
    """
    weights, metadata = shard_weights, shard_metadata
    if len(weights) != len(metadata) or not weights:
        raise ValueError("Require metadata for each shard and non-empty shards")
    whole: dict[str, torch.Tensor] = {}
    for of_wrapper in metadata[0]["param_metadata"]:
        path = f"{of_wrapper['fsdp_path']}." if of_wrapper["fsdp_path"] else ""
        alone = of_wrapper["no_broadcast_optim_state"]  # a group of one rank: its part is the whole
        for key, parameters in of_wrapper["params"].items():
            if path + key not in weights[0] and not strict:
                continue
            parts = [state[path + key] for state in weights[: 1 if alone else None]]
            whole[path + key] = torch.cat(parts).view(*parameters["shapes"])
        for source, target in of_wrapper["shared_param_info"]:
            whole[path + target] = whole[path + source]
    if with_module_buffers:
        whole |= {name: weights[0][name] for name in metadata[0]["buffer_names"] if strict or name in weights[0]}
    return whole


def _wrappers(module: TorchFSDP) -> Iterator[tuple[str, TorchFSDP]]:
    """(path with a dot at its end, wrapper) of this wrapper and those within it."""
    for name, each in module.named_modules():
        if isinstance(each, TorchFSDP):
            yield f"{plain(name)}." if plain(name) else "", each


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, each in module.named_modules():
        for name, buffer in each.named_buffers(recurse=False):
            if name not in each._non_persistent_buffers_set:
                yield plain(f"{path}.{name}" if path else name), buffer


def gathered(module: TorchFSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The whole state in host memory on the group's rank 0, by the parameters' numbers; None elsewhere. Collective.

    For a wrapper in a group of one rank it has only rank 0's state: "uncollected_local_ids" has the wrapper's number.
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
    names = {numbers[p.parameter]: name for name, p in _by_name(module).items() if p.parameter in numbers}
    return {
        "state": whole,
        "param_groups": groups,
        "param_id_map": local,
        "uncollected_local_ids": sorted(alone),
        "param_names": names,
    }


def _by_name(module: TorchFSDP) -> dict[str, Piece]:
    return {f"{path}{piece.name}": piece for path, wrapper in _wrappers(module) for piece in pieces(wrapper)}


def sharded(module: TorchFSDP, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a whole state, in the form that an optimizer over the module's parameters loads. Its groups may hold
    them in any order.
    """
    _one_group(module)
    full, held = full_optim_state_dict, _by_name(module)
    numbers = [number for group in full["param_groups"] for number in group["params"]]
    if (names := full.get("param_names")) is None:  # FairScale's own, of an optimizer over all parameters in their order
        order = {piece.parameter: name for name, piece in held.items()}
        names = dict(zip(numbers, [order[p] for p in module.parameters() if p in order], strict=False))
        names = names if len(numbers) == len(held) else {}
    if missing := [number for number in numbers if names.get(number) not in held]:
        raise CheckpointMismatchError(
            f"the optimizer's state has {len(numbers)} parameters, of which {len(missing)} are not among the {len(held)} of this "
            "module. Restore it into the module that it was saved with."
        )
    state = {}
    for number in numbers:
        piece = held[names[number]]
        given = full["state"].get(number)
        if given and piece.parameter.numel():
            state[number] = {key: _cut(value, piece) for key, value in given.items()}
    return {"state": state, "param_groups": [dict(group) for group in full["param_groups"]]}


def _is_alone(wrapper: TorchFSDP, around: TorchFSDP) -> bool:
    """Whether its state differs on every rank, like an expert's: then the first rank's stands for all."""
    return wrapper.world_size == 1 < around.world_size


def _one_group(module: TorchFSDP) -> dist.ProcessGroup | None:
    groups = {id(m.process_group): m.process_group for m in wrappers(module) if not _is_alone(m, module)}
    if len(groups) > 1:
        raise LayoutError("an optimizer's state over several process groups: save it with echelon.DistributedCheckpointSaver.")
    return next(iter(groups.values()))


def _piece(parameter: torch.Tensor, value: Any) -> Any:
    """A value of the state. One with a number per element becomes a list of one flat tensor, to tell it from others."""
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
    return part.clone().view(piece.parameter.shape)  # the whole shape if one rank has all of it
