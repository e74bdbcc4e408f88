"""Buffers of a sharded module: rank 0's for all, as DistributedDataParallel has it.

`fully_shard` and the older FSDP leave buffers alone: every rank would evaluate a batch norm with running statistics of its own.
Before a forward pass that may train, what the passes before have changed is sent from rank 0; and once before the first one of
an evaluation. What never changes (a mask, a table of angles) is never sent: the ranks agree on what does, after the first pass
and at each evaluation.

Communication: one broadcast per type and device of the buffers that change; none without such.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from echelon.world import agree

__all__ = ["Buffers"]


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
        if module in cls._all or all(dist.get_world_size(g) == 1 for g in groups) or not any(True for _ in module.buffers()):
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
