"""Parameters that several stages use: tied ones, and those that lie in no unit. Each stage that uses one keeps a copy.

The copies start equal, and their gradients are summed over these stages before anything looks at them, so that they stay equal.
Communication: a broadcast at the start, an all-reduce of each one's gradient after the last backward pass of a window.
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
        """After the last backward pass. A copy without a gradient counts as zero; without any, none has one. Collective."""
        for parameter, group in self._kept:
            if not parameter.requires_grad:
                continue
            grad = None if parameter.grad is None else local(parameter.grad)
            has = torch.tensor([grad is not None], dtype=torch.int32, device=local(parameter).device)
            dist.all_reduce(has, op=dist.ReduceOp.SUM, group=group)
            if not int(has):
                continue
            if grad is None:
                whole = parameter.grad = torch.zeros_like(parameter)
                grad = local(whole)
            total = grad.contiguous()
            dist.all_reduce(total, group=group)
            grad.copy_(total)
