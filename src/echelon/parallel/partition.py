"""An optimizer whose state is divided among the ranks: each rank updates the parameters that it owns, and sends them to all.

The user's own optimizer object stays, so schedulers, scalers and hooks on it go on working; its parameter groups are reduced
to what this rank owns. torch's ZeroRedundancyOptimizer would be another object, built from a class and its arguments, which
an optimizer that exists does not give away (AdamW's `defaults` are not arguments that AdamW accepts).

Communication: after each step one broadcast per owner, type and device; parameters are views of the buffers that are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from echelon.contracts.errors import UsageError
from echelon.world import agree

__all__ = ["Partition", "assign"]

_ALIGNMENT_BYTES = 64  # what vectorised kernels like their tensors to start at


def assign(sizes: Sequence[int], owners: int) -> list[int]:
    """The owner of each item, so that owners have about equally much: the largest first, to whom has least. Deterministic."""
    load, chosen = [0] * owners, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        chosen[i] = min(range(owners), key=lambda r: (load[r], r))
        load[chosen[i]] += sizes[i]
    return chosen


class Partition:
    """Divides the state of an optimizer over the ranks of a group, whose gradients must be equal already. Collective.

    A frozen parameter belongs to nobody. Parameters that come later by `add_param_group` are divided at the next step.

    Args:
        optimizer: just built; its groups keep only what this rank owns. What its constructor made for others is dropped.
        names: parameter names for messages.
    Attributes:
        groups: every group's parameters, whoever owns them, in the order of the optimizer's groups.
    Raises:
        UsageError: an optimizer that looks at all parameters at once; ranks whose optimizers differ.
    """

    _all: ClassVar[WeakKeyDictionary[torch.optim.Optimizer, Partition]] = WeakKeyDictionary()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
        names: dict[nn.Parameter, str] | None = None,
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "strategy 'zero1': LBFGS looks at all parameters at once; it cannot be divided. Take strategy 'ddp'."
            )
        if Partition.of(optimizer) is not None:
            raise UsageError(
                f"this {type(optimizer).__name__} is divided already: strategy 'zero1' divides what the unit builds."
            )
        self._group, self._names = group, names or {}
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self.groups: list[list[nn.Parameter]] = []
        self._buffers: list[tuple[int, torch.Tensor]] = []
        self._frozen: list[nn.Parameter] = []
        self._is_alone = False
        self._take(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        # The optimizer's own would leave the gradients of what others own.
        optimizer.zero_grad = partial(_zero_grad, self)  # type: ignore[method-assign]
        Partition._all[optimizer] = self

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> Partition | None:
        """The partition of an optimizer, if it has one."""
        return Partition._all.get(optimizer)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Steps inside change nothing that others must learn of."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.groups for p in group]

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the groups that are not divided yet."""
        new = optimizer.param_groups[len(self.groups) :]
        parameters = [p for group in new for p in group["params"] if p.requires_grad]
        agree.same_on_all(
            "the optimizer's parameters",
            [[len(group["params"]), sum(p.numel() for p in group["params"])] for group in new],
            "Every rank must build the same optimizer.",
        )
        owners = dict(zip(parameters, assign([p.numel() * p.element_size() for p in parameters], self._size), strict=True))
        twice = owners.keys() & set(self.parameters)
        if twice:
            raise UsageError(f"strategy 'zero1': {self._names.get(twice.pop(), 'a parameter')} is in the optimizer already.")
        for group in new:
            self.groups.append(list(group["params"]))
            self._frozen += [p for p in group["params"] if not p.requires_grad]
            group["params"] = [p for p in group["params"] if owners.get(p) == self._rank]
        for parameter in parameters:
            if owners[parameter] != self._rank:
                optimizer.state.pop(parameter, None)
        kinds: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter, owner in owners.items():
            kinds.setdefault((owner, parameter.dtype, parameter.device), []).append(parameter)
        if self._size > 1:
            self._buffers += [(owner, _flatten(same)) for (owner, _, _), same in kinds.items()]

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_alone:
            return
        if len(optimizer.param_groups) > len(self.groups):
            self._take(optimizer)
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise UsageError(
                    f"strategy 'zero1': {self._names.get(parameter, 'a parameter')} was frozen when the optimizer was built, and "
                    "has a gradient now that no rank has reduced. Unfreeze it before the module is prepared; give it an lr of 0 "
                    "until then."
                )

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_alone:
            return
        works = [dist.broadcast(b, group_src=owner, group=self._group, async_op=True) for owner, b in self._buffers]
        for work in works:
            assert work is not None
            work.wait()


def _zero_grad(partition: Partition, set_to_none: bool = True) -> None:
    for group in partition.groups:
        for parameter in group:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()


def _flatten(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Move parameters of one type and device into one buffer, of which they become views."""
    step = max(1, _ALIGNMENT_BYTES // parameters[0].element_size())
    room = [(p.numel() + step - 1) // step * step for p in parameters]
    flat = torch.zeros(sum(room), dtype=parameters[0].dtype, device=parameters[0].device)
    start = 0
    for parameter, size in zip(parameters, room, strict=True):
        # As it lies in memory: channels-last weights keep their strides, which gradient buckets rely on.
        order = sorted(range(parameter.dim()), key=lambda d: (-parameter.stride()[d], d))
        shape = [parameter.shape[d] for d in order]
        view = flat[start : start + parameter.numel()].view(shape).permute([order.index(d) for d in range(len(order))])
        view.copy_(parameter.detach())
        parameter.data = view
        start += size
    return flat
