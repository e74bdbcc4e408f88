"""`load_state_dict` of a sharded module takes whole tensors, too, such as pretrained weights."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.shards import is_split, reshard

__all__ = ["part_like", "take_whole_states"]


def take_whole_states(root: nn.Module) -> None:
    """From now on. Each rank takes its parts of the tensors that it is given, so these must be the same on all ranks.

    Args:
        root: of `fully_shard`; its parameters are split.
    """
    for part in root.modules():
        split = [name for name, p in part.named_parameters(recurse=False) if is_split(p)]
        if split:
            part.register_load_state_dict_pre_hook(partial(_split, weakref.ref(root), split))


def _split(root: weakref.ref[nn.Module], names: list[str], part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    mine = dict(part.named_parameters(recurse=False))
    if not all(is_split(mine[name]) for name in names if name in mine):  # an evaluation leaves whole ones, which are lost
        reshard(root() or part)
        mine = dict(part.named_parameters(recurse=False))
    for name in names:
        given, parameter = state.get(prefix + name), mine.get(name)
        if parameter is None or not is_split(parameter) or not isinstance(given, torch.Tensor) or is_split(given):
            continue
        if given.shape == parameter.shape:  # else torch says so
            state[prefix + name] = part_like(given, parameter, prefix + name)


def part_like(given: torch.Tensor, parameter: Any, name: str) -> torch.Tensor:
    """A whole tensor, which every rank has, split as a parameter is.

    Raises:
        UsageError: it is split along several axes.
    """
    from torch.distributed.tensor import distribute_tensor

    if any(type(each).__name__ not in ("Shard", "Replicate") for each in parameter.placements):
        raise LayoutError(
            f"{name} is split along several axes, as {parameter.placements}, and takes no whole tensor. Load weights before the "
            "module is made parallel."
        )
    value = given.detach().to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
