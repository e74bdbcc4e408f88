"""An optimizer whose state is sharded over the ranks: each rank updates the parameters that it owns, and broadcasts them.

The user's own optimizer object stays, so schedulers, scalers and hooks on it keep working; in a step its parameter groups are
what this rank owns, and between steps all of them, as scripts that clip or look at gradients expect. torch's
ZeroRedundancyOptimizer would be another object, built from a class and its arguments, which an optimizer that exists does not
give away (AdamW's `defaults` are not arguments that AdamW accepts).

Communication: after each step one broadcast per owner, type and device; parameters are views of the buffers that are sent.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import OptimizerError
from echelon.parallel.names import imported
from echelon.parallel.patching import replace
from echelon.parallel.state.inner import hooked
from echelon.parallel.state.sharded import tell_when_optimizer_is_pickled
from echelon.world import agree

__all__ = ["Partition", "assign", "is_zero_redundancy", "parameter_groups", "parameters_of"]

_ALIGNMENT_BYTES = 64  # what vectorised kernels like their tensors to start at


def assign(sizes: Sequence[int], load: list[int], *, largest_first: bool = True) -> list[int]:
    """The owner of each item, so that owners have about equally much: to whom has least. Deterministic.

    Args:
        load: what each owner has; what it gets is added.
        largest_first: else in the order of the items, which divides less evenly.
    """
    chosen = [0] * len(sizes)
    least = [(has, owner) for owner, has in enumerate(load)]
    heapq.heapify(least)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)) if largest_first else range(len(sizes)):
        owner = chosen[i] = least[0][1]
        load[owner] += sizes[i]
        heapq.heapreplace(least, (load[owner], owner))
    return chosen


@dataclass
class _Buffer:
    """One owner's parameters of one type and device, which are views of `flat`; and where they lay when it was made."""

    owner: int
    parameters: list[nn.Parameter]
    flat: torch.Tensor
    addresses: list[int]

    @property
    def is_lost(self) -> bool:
        """Whether a parameter has been given other memory since: `module.to(...)`, or `parameter.data = ...`."""
        return any(p.data_ptr() != address for p, address in zip(self.parameters, self.addresses, strict=True))


class Partition:
    """Divides the state of an optimizer over the ranks of a group, whose gradients must be equal already. Collective.

    A frozen parameter belongs to nobody. Parameters that come later by `add_param_group` are divided at the next step, those
    that are unfrozen later by `refresh`.

    Args:
        optimizer: just built. What its constructor made for what others own is dropped.
        names: parameter names for messages.
        what: who divides, for messages.
        unfreezing: what to do about a parameter that was unfrozen too late, for messages.
        largest_first: as in `assign`.
        shows_all: the optimizer's groups have all parameters between its steps; else always what this rank owns.
    Attributes:
        groups: every group's parameters, of all owners, in the order of the optimizer's groups.
        owners: the rank within the group that owns a parameter; frozen ones are not in it.
    Raises:
        UsageError: an optimizer that looks at all parameters at once; ranks whose optimizers differ.
    """

    _all: ClassVar[WeakKeyDictionary[torch.optim.Optimizer, Partition]] = WeakKeyDictionary()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
        names: dict[nn.Parameter, str] | None = None,
        *,
        what: str = "layout 'zero1'",
        unfreezing: str = "Unfreeze it before the module is prepared; give it an lr of 0 until then.",
        largest_first: bool = True,
        shows_all: bool = True,
    ) -> None:
        self._shows_all, self._mine = shows_all, list[list[nn.Parameter]]()
        self._what, self._unfreezing = what, unfreezing
        if isinstance(optimizer, torch.optim.LBFGS):
            raise OptimizerError(f"{what} cannot shard LBFGS, which needs all parameters at once. Use layout 'ddp'.")
        if Partition.of(optimizer) is not None or is_zero_redundancy(optimizer):
            raise OptimizerError(
                f"this {type(optimizer).__name__} is sharded already, and {what} would shard it again. Build it unsharded."
            )
        self._group, self._names = group, names or {}
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self.groups: list[list[nn.Parameter]] = []
        self.owners: dict[nn.Parameter, int] = {}
        self._buffers: list[_Buffer] = []
        self._frozen: list[nn.Parameter] = []
        self._load, self._largest_first = [0] * self._size, largest_first
        self._optimizer = weakref.ref(optimizer)
        self._take(optimizer)
        hooked(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        # The optimizer's own would leave the gradients of what others own.
        replace(optimizer, "zero_grad", "partition", partial(_zero_grad, self))
        for name in ("train", "eval"):  # schedule-free optimizers put other values in the place of their parameters
            if callable(getattr(type(optimizer), name, None)):
                replace(optimizer, name, "partition", partial(self._change, name))
        Partition._all[optimizer] = self
        if self._size > 1 and what.startswith("layout"):  # others consolidate what they give
            tell_when_optimizer_is_pickled(optimizer)

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> Partition | None:
        """The partition of an optimizer, if it has one."""
        return Partition._all.get(optimizer)

    @staticmethod
    def behind(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that does the work: itself, or the divided one that it is a facade of."""
        if is_zero_redundancy(optimizer):
            return optimizer.optim  # type: ignore[attr-defined, no-any-return]
        partition = Partition.of(optimizer)
        return optimizer if partition is None else partition.optimizer

    def stands_behind(self, facade: torch.optim.Optimizer) -> None:
        """`Partition.of(facade)` is this one from now on: another optimizer through which users see the divided one."""
        Partition._all[facade] = self

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The divided optimizer itself."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._group

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.groups for p in group]

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank does."""
        return self.owners.get(parameter) == self._rank  # type: ignore[call-overload, no-any-return]

    def refresh(self) -> None:
        """Give owners to what was added or unfrozen since. Collective; from then on its gradients must be equal, too."""
        self._take(self.optimizer)
        unfrozen = [p for p in self._frozen if p.requires_grad]
        agree.same_on_all(
            "what has been unfrozen", [list(p.shape) for p in unfrozen], "Unfreeze the same on every rank.", self._group
        )
        if unfrozen:
            self._frozen = [p for p in self._frozen if not p.requires_grad]
            self._divide(self.optimizer, unfrozen)

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the groups that are not divided yet."""
        new = optimizer.param_groups[len(self.groups) :]
        agree.same_on_all(
            "the optimizer's parameters",
            [[len(group["params"]), sum(p.numel() for p in group["params"])] for group in new],
            "Every rank must build the same optimizer.",
            self._group,
        )
        parameters = [p for group in new for p in group["params"] if p.requires_grad]
        twice = set(parameters) & set(self.parameters)
        if twice:
            raise OptimizerError(f"{self._what}: {self._names.get(twice.pop(), 'a parameter')} is already in the optimizer.")
        for group in new:
            self.groups.append(list(group["params"]))
            self._frozen += [p for p in group["params"] if not p.requires_grad]
        self._divide(optimizer, parameters)

    def _divide(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        sizes = [p.numel() * p.element_size() for p in parameters]
        owners = dict(zip(parameters, assign(sizes, self._load, largest_first=self._largest_first), strict=True))
        self.owners |= owners
        self._mine = [[p for p in everyones if self.owns(p)] for everyones in self.groups]
        _show(optimizer, self.groups if self._shows_all else self._mine)
        for parameter in parameters:
            if owners[parameter] != self._rank:
                optimizer.state.pop(parameter, None)
        if self._size > 1:
            self._buffers += _buffers(parameters, owners)

    def _change(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the optimizer that changes parameters beside its step, of those that this rank owns. Collective."""
        self._before(self.optimizer, args, kwargs)
        try:
            return getattr(type(self.optimizer), name)(self.optimizer, *args, **kwargs)
        finally:
            self._after(self.optimizer, args, kwargs)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if len(optimizer.param_groups) > len(self.groups):
            self._take(optimizer)
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise OptimizerError(
                    f"{self._what}: {self._names.get(parameter, 'a parameter')} was frozen when the optimizer was built, and "
                    f"has a gradient now that no rank has reduced. {self._unfreezing}"
                )
        _show(optimizer, self._mine)

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._shows_all:
            _show(optimizer, self.groups)
        if any(buffer.is_lost for buffer in self._buffers):
            # Each at its own place, so that the order of the broadcasts is the same on all ranks.
            buffers = ([b] if not b.is_lost else _buffers(b.parameters, self.owners) for b in self._buffers)
            self._buffers = [buffer for each in buffers for buffer in each]
        works = [dist.broadcast(b.flat, group_src=b.owner, group=self._group, async_op=True) for b in self._buffers]
        for work in works:
            assert work is not None
            work.wait()


def is_zero_redundancy(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's own: a facade, whose groups have everyone's parameters, of an optimizer over what this rank owns."""
    return isinstance(optimizer, imported("torch.distributed.optim", "ZeroRedundancyOptimizer"))


def parameter_groups(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    """The parameters of each group, also those that other ranks own."""
    partition = Partition.of(optimizer)
    divided = partition.groups if partition is not None else []
    return [*divided, *(group["params"] for group in optimizer.param_groups[len(divided) :])]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, also those that other ranks own; each once."""
    return list({id(p): p for group in parameter_groups(optimizer) for p in group}.values())


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its parameters have any: as a rule all are cleared, or none."""
    groups = parameter_groups(optimizer)
    return any(parameter.grad is not None for parameter in (*groups[0][:1], *groups[-1][-1:]))


def _buffers(parameters: Iterable[nn.Parameter], owners: dict[nn.Parameter, int]) -> list[_Buffer]:
    kinds: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((owners[parameter], parameter.dtype, parameter.device), []).append(parameter)
    made = []
    for (owner, _, _), same in kinds.items():
        flat = _flatten(same)
        made.append(_Buffer(owner, same, flat, [p.data_ptr() for p in same]))
    return made


def _show(optimizer: torch.optim.Optimizer, groups: list[list[nn.Parameter]]) -> None:
    for group, parameters in zip(optimizer.param_groups, groups, strict=False):  # of more, some are not divided yet
        group["params"] = parameters


def _zero_grad(partition: Partition, set_to_none: bool = True) -> None:
    for group in parameter_groups(partition.optimizer):  # also those that are divided only at the next step
        for parameter in group:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach().zero_()  # which may be a view of a bucket


def _flatten(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Move parameters of one type and device into one buffer, of which they become views."""
    step = max(1, _ALIGNMENT_BYTES // parameters[0].element_size())
    room = [(p.numel() + step - 1) // step * step for p in parameters]
    flat = parameters[0].new_zeros(sum(room))
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
