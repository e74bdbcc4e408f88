"""Put what is about to be split on the device: filled if it has no values, and equal on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.shards import is_split, local
from echelon.world import agree
from echelon.world.init import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Buffers", "place"]


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
    tensors = {id(t): t for m in todo for _, t in (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False))}
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


# Buffers of a sharded module: rank 0's for all, as DistributedDataParallel has it.
#
# `fully_shard` and the older FSDP leave buffers alone: every rank would evaluate a batch norm with running statistics of its own.
# Before a forward pass that may train, what the passes before have changed is sent from rank 0; and once before the first one of
# an evaluation. What never changes (a mask, a table of angles) is never sent: the ranks agree on what does, after the first pass
# and at each evaluation.
#
# Communication: one broadcast per type and device of the buffers that change; none without such.


class Buffers:
    """Keeps the buffers of a module equal over the ranks of `groups`. Its forward must be collective."""

    _all: ClassVar[weakref.WeakKeyDictionary[nn.Module, Buffers]] = weakref.WeakKeyDictionary()

    def __init__(self, groups: Sequence[dist.ProcessGroup | None]) -> None:
        self._groups = list(groups)
        self._seen: dict[str, list[float]] = {}  # checksums of when the ranks last looked
        self._changing: dict[str, None] = {}
        self._passes = 0
        self._due = False

    @classmethod
    def keep_equal(cls, module: nn.Module, groups: Sequence[dist.ProcessGroup | None], *, begin: bool = False) -> None:
        """From now on. A module without buffers is left alone, and a second call does nothing. Collective if `begin`.

        Args:
            begin: send rank 0's at once: nobody has made them equal yet.
        """
        has_buffers = any(part._buffers for part in module.modules())  # also those that are None as yet
        if module in cls._all or all(dist.get_world_size(g) == 1 for g in groups) or not has_buffers:
            return
        made = cls._all[module] = cls(groups)
        made._seen = _checksums(module)
        if begin:
            made._changing = dict.fromkeys(made._seen)
            made._send(module)
            made._changing = {}
        module.register_forward_pre_hook(torch.compiler.disable(made._before_forward), prepend=True)

    @classmethod
    def expire(cls, module: nn.Module) -> None:
        """The next forward pass sends the buffers, also one that trains nothing."""
        if module in cls._all:
            cls._all[module]._due = True

    @classmethod
    def settle(cls, module: nn.Module) -> None:
        """Send rank 0's now, as a forward pass would do. Collective."""
        if module in cls._all:
            cls._all[module]._agree(module)
            cls._all[module]._send(module)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            if self._passes == 1:
                self._agree(module)
            self._send(module)
            self._passes += 1
            self._due = True
        elif self._due:
            self._agree(module)
            self._send(module)
            self._due = False

    def _agree(self, module: nn.Module) -> None:
        """On which buffers change. What one rank alone has changed counts, too. Collective."""
        now, equal = _checksums(module), _equal_anyway(module)
        known = {*self._changing, *equal}
        names = [n for n, checksum in now.items() if n not in known and checksum != self._seen.get(n)]
        for group in self._groups:
            names = list(dict.fromkeys(n for each in agree.kinds(names, group) for n in each))
        self._changing |= dict.fromkeys(names)

    @torch.no_grad()
    def _send(self, module: nn.Module) -> None:
        if not self._changing:
            return
        named = dict(module.named_buffers())
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for name in self._changing:
            if (buffer := named.get(name)) is not None:
                kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for same in kinds.values():
            flat = torch.cat([b.reshape(-1) for b in same])
            sent = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
            for group in self._groups:
                dist.broadcast(sent, group_src=0, group=group)
            start = 0
            for buffer in same:
                # `data` counts no version: a backward pass may still need what it was, as DistributedDataParallel lets it.
                buffer.data.copy_(flat[start : start + buffer.numel()].view(buffer.shape))
                start += buffer.numel()


def _equal_anyway(module: nn.Module) -> list[str]:
    """Buffers of modules that say so: a router of experts, whose biases follow from what all ranks have added up."""
    parts = [(path, part) for path, part in module.named_modules() if getattr(part, "ranks_agree", False) is True]
    return [f"{path}{path and '.'}{name}" for path, part in parts for name, _ in part.named_buffers(recurse=False)]


@torch.no_grad()
def _checksums(module: nn.Module) -> dict[str, list[float]]:
    """Two numbers a buffer, one of which depends on the order. Versions tell nothing: batch norm does not count them up."""
    named = {n: b for n, b in module.named_buffers() if b.numel() and not b.is_meta}
    sums: dict[str, list[float]] = {}
    for name, buffer in named.items():
        flat = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        flat = flat.reshape(-1).double()
        ramp = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
        sums[name] = torch.stack([flat.sum(), flat @ ramp]).tolist()
    return sums
