"""An optimizer whose state is partitioned over the ranks: each rank updates the parameters that it owns, and broadcasts them.

The user's optimizer object stays, so schedulers, scalers and hooks on it keep working. During a step its parameter groups hold
the parameters that this rank owns; between steps they hold all parameters, as scripts that clip or read gradients expect. torch's
ZeroRedundancyOptimizer would be another object, built from a class and its arguments, which an existing optimizer does not reveal
(AdamW's `defaults` are not arguments that AdamW accepts).

Communication: after each step one broadcast per owner, dtype and device; parameters are views of the buffers that are sent.
"""

from __future__ import annotations

import copy
import heapq
import inspect
import weakref
from collections import defaultdict
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
from echelon.world import agree, rng

__all__ = ["Partition", "assign", "is_zero_redundancy", "needs_all", "parameter_groups", "parameters_of"]

_ALIGNMENT_BYTES = 64  # of each parameter in a buffer, for vectorised kernels


def assign(sizes: Sequence[int], load: list[int], *, largest_first: bool = True) -> list[int]:
    """The owner of each item: always the owner with the least load, so that loads are about equal. Deterministic.

    Args:
        load: each owner's load, which is updated.
        largest_first: assign the largest items first; else in the order of the items, which is less even.
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
    """One owner's parameters of one dtype and device, which are views of `flat`, and their addresses when it was made."""

    owner: int
    parameters: list[nn.Parameter]
    flat: torch.Tensor
    addresses: list[int]

    @property
    def is_lost(self) -> bool:
        """Whether a parameter has other memory now, after `module.to(...)` or `parameter.data = ...`."""
        return any(p.data_ptr() != address for p, address in zip(self.parameters, self.addresses, strict=True))


class Partition:
    """Partitions the state of an optimizer over the ranks of a group, which must already have equal gradients. Collective.

    Frozen parameters have no owner. Parameters that are added later by `add_param_group`, or unfrozen, get one at the next step.

    Args:
        optimizer: just built. State that its constructor made for other ranks' parameters is dropped.
        names: parameter names for messages.
        what: the layout or class that partitions, for messages.
        unfreezing: for those who average only gradients of parameters with an owner: what a script must do when it has unfrozen
            parameters, for messages. They get their owners by `refresh` only.
        largest_first: as in `assign`.
    Attributes:
        groups: every group's parameters, of all owners, in the order of the optimizer's groups.
        owners: the rank within the group that owns each parameter, without frozen ones.
    Raises:
        UsageError: an optimizer that needs all parameters at once, or ranks whose optimizers differ.
    """

    _all: ClassVar[WeakKeyDictionary[torch.optim.Optimizer, Partition]] = WeakKeyDictionary()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
        names: dict[nn.Parameter, str] | None = None,
        *,
        what: str = "layout 'zero1'",
        unfreezing: str | None = None,
        largest_first: bool = True,
    ) -> None:
        self._mine: list[list[nn.Parameter]] = []
        self._what, self._unfreezing = what, unfreezing
        if isinstance(optimizer, torch.optim.LBFGS):
            raise OptimizerError(f"{what} cannot shard LBFGS, which needs all parameters at once. Use layout 'ddp'.")
        if Partition.of(optimizer) is not None or is_zero_redundancy(optimizer):
            raise OptimizerError(
                f"this {type(optimizer).__name__} is already sharded, and {what} would shard it again. Build it unsharded."
            )
        if _communicates(type(optimizer)):
            raise OptimizerError(
                f"{type(optimizer).__name__} exchanges tensors between the ranks itself, but with {what} each rank would give it "
                "other parameters. Use layout 'ddp'."
            )
        if (problem := needs_all(optimizer, what)) is not None:
            raise OptimizerError(problem)
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
        # The optimizer's own zero_grad would leave the gradients of other ranks' parameters.
        replace(optimizer, "zero_grad", "partition", partial(_zero_grad, self))
        for name in ("train", "eval"):  # schedule-free optimizers swap their parameters' values here
            if callable(getattr(type(optimizer), name, None)):
                replace(optimizer, name, "partition", partial(self._change, name))
        Partition._all[optimizer] = self
        if self._size > 1 and what.startswith("layout"):  # other users consolidate the state dict themselves
            tell_when_optimizer_is_pickled(optimizer)

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> Partition | None:
        """The partition of an optimizer, if it has one."""
        return Partition._all.get(optimizer)

    @staticmethod
    def behind(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that does the work: itself, or the partitioned one behind this facade."""
        if is_zero_redundancy(optimizer):
            return optimizer.optim  # type: ignore[attr-defined, no-any-return]
        partition = Partition.of(optimizer)
        return optimizer if partition is None else partition.optimizer

    def stands_behind(self, facade: torch.optim.Optimizer) -> None:
        """Have `Partition.of(facade)` return this: users see the partitioned optimizer through the optimizer `facade`."""
        Partition._all[facade] = self

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The partitioned optimizer itself."""
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
        """Whether this rank owns the parameter."""
        return self.owners.get(parameter) == self._rank  # type: ignore[call-overload, no-any-return]

    def refresh(self) -> None:
        """Give owners to parameters added or unfrozen since. Collective. From then on ranks must have equal gradients of them."""
        self._take(self.optimizer)
        unfrozen = [p for p in self._frozen if p.requires_grad]
        agree.same_on_all(
            "the unfrozen parameters", [list(p.shape) for p in unfrozen], "Unfreeze the same on every rank.", self._group
        )
        if unfrozen:
            self._frozen = [p for p in self._frozen if not p.requires_grad]
            self._divide(self.optimizer, unfrozen)

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        """Give owners to the parameters of groups that were added since."""
        new = optimizer.param_groups[len(self.groups) :]
        agree.same_on_all(
            "the optimizer's parameters",
            [[len(group["params"]), sum(p.numel() for p in group["params"])] for group in new],
            "Every rank must build the same optimizer.",
            self._group,
        )
        parameters = [p for group in new for p in group["params"] if p.requires_grad]
        for group in new:
            self.groups.append(list(group["params"]))
            self._frozen += [p for p in group["params"] if not p.requires_grad]
        self._divide(optimizer, parameters)

    def _divide(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        sizes = [p.numel() * p.element_size() for p in parameters]
        owners = dict(zip(parameters, assign(sizes, self._load, largest_first=self._largest_first), strict=True))
        self.owners |= owners
        self._mine = [[p for p in everyones if self.owns(p)] for everyones in self.groups]
        _show(optimizer, self.groups)
        for parameter in parameters:
            if owners[parameter] != self._rank:
                optimizer.state.pop(parameter, None)
        if self._size > 1:
            self._buffers += _buffers(parameters, owners)

    def _change(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method that changes parameters outside of a step, such as `train`, for this rank's parameters. Collective."""
        self._before(self.optimizer, args, kwargs)
        try:
            return getattr(type(self.optimizer), name)(self.optimizer, *args, **kwargs)
        finally:
            self._after(self.optimizer, args, kwargs)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        unfrozen = [parameter for parameter in self._frozen if parameter.grad is not None]
        if unfrozen and self._unfreezing is not None:
            raise OptimizerError(
                f"{self._what}: {self._names.get(unfrozen[0], 'a parameter')} was frozen when the optimizer was built, and now "
                f"has a gradient that was not reduced. {self._unfreezing}"
            )
        if unfrozen or len(optimizer.param_groups) > len(self.groups):
            self.refresh()
        _show(optimizer, self._mine)

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        _show(optimizer, self.groups)
        if any(buffer.is_lost for buffer in self._buffers):
            # Replace each in its place, so that all ranks broadcast in the same order.
            buffers = ([b] if not b.is_lost else _buffers(b.parameters, self.owners) for b in self._buffers)
            self._buffers = [buffer for each in buffers for buffer in each]
        works = [dist.broadcast(b.flat, group_src=b.owner, group=self._group, async_op=True) for b in self._buffers]
        for work in works:
            assert work is not None
            work.wait()


def is_zero_redundancy(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's own: a facade with all ranks' parameters before an optimizer with this rank's parameters."""
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
    """Whether its parameters have gradients. Looks at the first and the last one: as a rule all are cleared, or none."""
    groups = parameter_groups(optimizer)
    ends = (*groups[0][:1], *groups[-1][-1:]) if groups else ()
    return any(parameter.grad is not None for parameter in ends)


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
    for group, parameters in zip(optimizer.param_groups, groups, strict=False):  # further groups have no owners yet
        group["params"] = parameters


def _zero_grad(partition: Partition, set_to_none: bool = True) -> None:
    for group in parameter_groups(partition.optimizer):  # also groups that get owners only at the next step
        for parameter in group:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach().zero_()  # it may be a view of a bucket


def _flatten(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Move parameters of one dtype and device into one buffer; they become views of it."""
    step = max(1, _ALIGNMENT_BYTES // parameters[0].element_size())
    room = [(p.numel() + step - 1) // step * step for p in parameters]
    flat = parameters[0].new_zeros(sum(room))
    start = 0
    for parameter, size in zip(parameters, room, strict=True):
        # In memory order: channels-last weights keep their strides, which gradient buckets rely on.
        order = sorted(range(parameter.dim()), key=lambda d: (-parameter.stride()[d], d))
        shape = [parameter.shape[d] for d in order]
        view = flat[start : start + parameter.numel()].view(shape).permute([order.index(d) for d in range(len(order))])
        view.copy_(parameter.detach())
        parameter.data = view
        start += size
    return flat


_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")  # in several forms of each


def _communicates(kind: type) -> bool:
    """Whether a script's own class of optimizer exchanges tensors between the ranks, as many a Muon does."""
    own = [each for each in kind.__mro__ if not each.__module__.startswith(("torch.", "echelon."))]
    methods = [inspect.unwrap(method) for each in own for method in vars(each).values() if callable(method)]
    names = {name for method in methods for name in getattr(getattr(method, "__code__", None), "co_names", ())}
    return "broadcast" in names or any(name.startswith(_COLLECTIVES) for name in names)


def needs_all(optimizer: torch.optim.Optimizer, what: str) -> str | None:
    """Describe that a script's own class steps a parameter by other ones' gradients, too, as LAMB does, which clips all by their
    norm; None if it does not.

    Two copies of it step tiny parameters. A copy that cannot be made, or does not step so, tells nothing.

    Args:
        what: the layout or class under which a rank has some of the parameters only.
    """
    if type(optimizer).__module__.startswith("torch."):
        return None
    try:
        few, many = (_tried(optimizer, scale)[::2] for scale in (1, 100))
        if all(map(torch.equal, few, many)):
            return None
    except Exception:
        return None
    return (
        f"{type(optimizer).__name__} steps each parameter by the gradients of all of them, as by their norm, but with {what} "
        "each rank would give it some only. Use layout 'ddp' or 'fsdp', or switch that off by its options."
    )


def _tried(optimizer: torch.optim.Optimizer, scale: float) -> list[torch.Tensor]:
    """Values of tiny parameters that a copy has stepped, with every other gradient scaled."""
    parameters = parameters_of(optimizer)
    tiny = [nn.Parameter(p.detach().new_ones([2] * p.dim())) for p in parameters]
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "step", "zero_grad") and "hook" not in name and not name.startswith("_echelon")
    }
    trial: Any = object.__new__(type(optimizer))
    vars(trial).update(copy.deepcopy(own, {id(p): each for p, each in zip(parameters, tiny, strict=True)}))
    trial.state = defaultdict(dict)
    hooked(trial)
    with rng.kept(parameters[0].device):
        torch.manual_seed(0)
        for largest in (2, 3, 5):
            for at, each in enumerate(tiny):
                steps = torch.linspace(-10, 10 * largest, each.numel(), dtype=each.dtype, device=each.device)
                each.grad = steps.reshape(each.shape) * (at + 1) * (scale if at % 2 else 1)
            type(trial).step(trial)
    return [each.detach() for each in tiny]
