"""FullyShardedDataParallel through pickle, `torch.save` and `copy.deepcopy`: every rank's own part, without a collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from echelon.common.errors import CheckpointMismatchError, LayoutError
from echelon.compat.fairscale.nn.data_parallel.shared import Owners
from echelon.compat.fairscale.nn.data_parallel.torch_fsdp import pieces

__all__ = ["form_of"]


def form_of(wrapper: TorchFSDP, options: dict[str, Any]) -> tuple[Any, ...]:
    """What `__reduce_ex__` gives: a process group cannot be pickled, so `_made` takes the default one."""
    if Owners.of_several(wrapper):
        raise LayoutError("FullyShardedDataParallel: wrappers that share parameters cannot be pickled. Save state_dict().")
    ranges = [(piece.name, piece.shape, piece.start) for piece in pieces(wrapper)]
    place = (wrapper.rank, wrapper.world_size)
    return _made, (type(wrapper), wrapper.module, options, ranges, place, wrapper.training)


def _made(
    kind: type[TorchFSDP],
    module: nn.Module,
    options: dict[str, Any],
    ranges: list[tuple[str, torch.Size, int]],
    place: tuple[int, int],
    training: bool,
) -> TorchFSDP:
    here = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if place != here:
        raise CheckpointMismatchError(
            f"this {kind.__name__} was pickled by rank {place[0]} of {place[1]}, and holds its part; this is rank {here[0]} of "
            f"{here[1]}. Save state_dict() to load it anywhere."
        )
    whole: dict[nn.Parameter, nn.Parameter] = {}
    for name, shape, start in ranges:
        part = module.get_parameter(name)
        filled = torch.zeros(shape, dtype=part.dtype, device=part.device)
        filled.view(-1)[start : start + part.numel()] = part.detach().view(-1)
        whole[part] = nn.Parameter(filled, part.requires_grad)
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in whole:
                setattr(each, name, whole[parameter])
    wrapper = kind.__new__(kind)
    vars(wrapper)["starts_from_rank0"] = False  # its elements are in the whole parameters, and others' are zeros
    wrapper.__init__(module, **options)  # type: ignore[misc]
    wrapper.training = training
    return wrapper
