"""Put what is about to be split on the device: filled if it has no values, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.shards import is_split, local
from echelon.world.init import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["place"]


def place(
    module: nn.Module,
    done: set[nn.Module],
    world: World,
    mesh: DeviceMesh,
    *,
    from_rank0: bool,
    init: Callable[[nn.Module], None] | None,
    name: str,
) -> None:
    """Values for all that is not split yet, on the device and equal on all ranks, as DistributedDataParallel makes them.

    Args:
        done: the submodules that had their turn; these are added.
        init: fills a submodule's own parameters, if they are on the meta device.
        name: of the module, for messages.
    """
    todo = [m for m in module.modules() if m not in done]
    done.update(todo)
    if init is not None:
        _fill(module, todo, init, name)
    tensors = {id(t): t for m in todo for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.is_meta:  # until all is split
                continue
            if tensor.device != world.device:
                tensor.data = tensor.data.to(world.device)
            # channels_last, a transposed weight: no part of it is one piece
            if tensor.layout is torch.strided and not (is_split(tensor) or tensor.is_contiguous()):
                tensor.data = tensor.data.contiguous()
            if from_rank0 and world.size > 1:
                _broadcast(tensor.detach(), mesh)


def _broadcast(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """From the mesh's first rank to all of them, axis by axis."""
    for axis in range(mesh.ndim):
        dist.broadcast(local(tensor), group_src=0, group=mesh.get_group(axis))


def _fill(root: nn.Module, parts: list[nn.Module], init: Callable[[nn.Module], None], root_name: str) -> None:
    """Give values to what is on the meta device. What was tied is tied again: filling makes new parameters."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in parts:
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((part, name))
    for part in parts:
        before = _on_meta(part)
        if not before:
            continue
        name = next((f".{n}" for n, m in root.named_modules() if n and m is part), "")
        first = f"{root_name}{name}.{before[0]}"
        init(part)
        if _on_meta(part):
            raise LayoutError(
                f"{first} must have a value after param_init_fn({type(part).__name__}), but it is still on the meta device."
            )
    for (holder, name), *others in places.values():
        for other, other_name in others:
            setattr(other, other_name, getattr(holder, name))


def _on_meta(part: nn.Module) -> list[str]:
    return [n for n, t in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)) if t.is_meta]
