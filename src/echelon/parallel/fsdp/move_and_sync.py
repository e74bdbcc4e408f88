"""Prepare modules to be sharded: initialized, on the device, and equal on all ranks. Later, keep their buffers equal."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from echelon.parallel.shards import is_split, local
from echelon.world import agree
from echelon.world.init import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Buffers", "equalize", "place"]


@torch.no_grad()
def equalize(tensors: Iterable[torch.Tensor], device: torch.device, groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Move tensors to the device, and give all ranks of each group, one after the other, the first rank's values. Those on the
    meta device get their values later.
    """
    for tensor in tensors:
        if tensor.is_meta:
            continue
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
        for group in groups:
            dist.broadcast(local(tensor.detach()), group_src=0, group=group)


def place(
    module: nn.Module,
    done: set[nn.Module],
    world: World,
    mesh: DeviceMesh,
    *,
    from_rank0: bool,
    init: Callable[[nn.Module], None] | None,
) -> None:
    """Initialize a module's tensors that are not split yet, move them to the device and, if `from_rank0`, broadcast rank 0's.

    Args:
        done: submodules that were handled before; this call adds its own.
        init: initializes a submodule's own parameters, if they are on the meta device.
    """
    todo = [m for m in module.modules() if m not in done]
    done.update(todo)
    if init is not None:
        _fill(todo, init)
    # By name: a module's own `parameters` may take no `recurse`.
    tensors = dict.fromkeys(t for m in todo for _, t in (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False)))
    for tensor in tensors:
        # channels_last, a transposed weight: a shard of it would not be contiguous
        if tensor.layout is torch.strided and not (tensor.is_meta or is_split(tensor) or tensor.is_contiguous()):
            tensor.data = tensor.data.contiguous()
    axes = range(mesh.ndim) if from_rank0 and world.size > 1 else ()
    equalize(tensors, world.device, [mesh.get_group(axis) for axis in axes])


def _fill(parts: list[nn.Module], init: Callable[[nn.Module], None]) -> None:
    """Initialize tensors on the meta device. `init` makes new parameters, so tied ones are tied again."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in parts:
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((part, name))
    for part in parts:
        if any(t.is_meta for t in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            init(part)
    for (holder, name), *others in places.values():
        for other, other_name in others:
            setattr(other, other_name, getattr(holder, name))


# Buffers of a sharded module: all ranks get rank 0's, as under DistributedDataParallel.
#
# `fully_shard` and the older FSDP leave buffers alone, so every rank would evaluate batch norm with its own running statistics.
# Rank 0 broadcasts the buffers that change before each forward pass with gradients, and before the first pass of an evaluation.
# Buffers that never change (a mask, a table of angles) are never sent: after the first pass and at each evaluation the ranks
# agree on which ones change.
#
# Communication: one broadcast per dtype and device of the changing buffers; none without any.


class Buffers:
    """Keeps the buffers of a module equal over the ranks of `groups`. Its forward must be collective."""

    _all: ClassVar[weakref.WeakKeyDictionary[nn.Module, Buffers]] = weakref.WeakKeyDictionary()

    def __init__(self, groups: Sequence[dist.ProcessGroup | None]) -> None:
        self._groups = list(groups)
        self._seen: dict[str, list[float]] = {}  # checksums of the buffers at the start
        self._changing: dict[str, None] = {}
        self._passes = 0
        self._due = False

    @classmethod
    def keep_equal(cls, module: nn.Module, groups: Sequence[dist.ProcessGroup | None], *, begin: bool = False) -> None:
        """Keep a module's buffers equal from now on. Does nothing without buffers, or a second time. Collective if `begin`.

        Args:
            begin: broadcast rank 0's buffers at once, since they may differ now.
        """
        has_buffers = any(part._buffers for part in module.modules())  # also buffers that are still None
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
        """Have the next forward pass broadcast the buffers, also one without gradients."""
        if module in cls._all:
            cls._all[module]._due = True

    @classmethod
    def settle(cls, module: nn.Module) -> None:
        """Broadcast rank 0's buffers now, as a forward pass would do. Collective."""
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
        """Agree on which buffers change; a change on a single rank counts. Collective."""
        if agree.is_alone():  # a plan's buffers have no values
            return
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
                # Through `data`, which bumps no version: a backward pass may have saved the buffer. DDP does the same.
                buffer.data.copy_(flat[start : start + buffer.numel()].view(buffer.shape))
                start += buffer.numel()


def _equal_anyway(module: nn.Module) -> list[str]:
    """Buffers of modules with `ranks_agree`: an expert router, whose biases follow from sums over all ranks."""
    parts = [(path, part) for path, part in module.named_modules() if getattr(part, "ranks_agree", False) is True]
    return [f"{path}{path and '.'}{name}" for path, part in parts for name, _ in part.named_buffers(recurse=False)]


@torch.no_grad()
def _checksums(module: nn.Module) -> dict[str, list[float]]:
    """Two numbers per buffer, one of which depends on the order. Version counters would not do: batch norm does not bump them."""
    named = {n: b for n, b in module.named_buffers() if b.numel() and not b.is_meta}
    sums: dict[str, list[float]] = {}
    for name, buffer in named.items():
        flat = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        flat = flat.reshape(-1).double()
        ramp = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
        sums[name] = torch.stack([flat.sum(), flat @ ramp]).tolist()
    return sums
