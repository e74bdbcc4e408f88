"""Parameters that several stages use: tied ones, and those that lie in no unit. Each stage that uses one keeps a copy.

The copies start equal, and their gradients are summed over these stages before anything looks at them, so that they stay equal.
Communication: a broadcast at the start, after the last backward pass of a window an all-reduce of who
has gradients, and one of each gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from echelon.parallel.shards import local

__all__ = ["Shared"]


class Shared:
    """
    Args:
        groups: by the first name of a parameter, the ranks that have a copy.
    Attributes:
        elsewhere: those of which an earlier stage's rank counts the norm.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._groups = groups
        self._kept: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self.elsewhere: set[nn.Parameter] = set()

    def bind(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Take the parameters that the module has now."""
        self._kept = [(p, self._groups[name]) for name, p in sorted(named, key=lambda pair: pair[0]) if name in self._groups]
        self.elsewhere = {p for p, group in self._kept if dist.get_rank(group) > 0}

    @torch.no_grad()
    def equalize(self) -> None:
        """The first copy's values everywhere. Collective."""
        for parameter, group in self._kept:
            if not parameter.is_meta:
                value = local(parameter.detach()).contiguous()
                dist.broadcast(value, group=group, group_src=0)
                local(parameter.detach()).copy_(value)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """After the last backward pass. A copy without a gradient counts as zero; without any, none has one. Collective.

        A copy may be frozen on one rank alone, so that every rank asks for all of them.
        """
        by_group: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        for parameter, group in self._kept:
            by_group.setdefault(group, []).append(parameter)
        for group, kept in by_group.items():
            flags = [float(p.requires_grad and p.grad is not None) for p in kept]
            has = torch.tensor(flags, device=local(kept[0]).device)
            dist.all_reduce(has, op=dist.ReduceOp.SUM, group=group)
            for parameter, count in zip(kept, has.tolist(), strict=True):
                if not count:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grad = local(parameter.grad)
                total = grad.contiguous()
                dist.all_reduce(total, group=group)
                grad.copy_(total)
