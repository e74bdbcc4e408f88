"""Check that the optimizer trains the model. One made before the module was sharded, or from a copy, silently updates nothing.

Only what cannot be intended is refused: parameters that the module had before it was sharded, and an AutoUnit's optimizer without
any of the module's parameters. Besides some of the module's parameters, an optimizer may hold any others.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.common.errors import OptimizerError
from echelon.contracts.overrides import overrides
from echelon.loop.records.monitored import is_own_loop
from echelon.parallel.ddp.bypass import watch
from echelon.parallel.fsdp.step_by_mesh import step_by_kind
from echelon.parallel.guards.guard import Guard
from echelon.parallel.guards.trained_params import SameTrained, name_before
from echelon.parallel.patching import replace
from echelon.parallel.shards import is_split, reshard
from echelon.parallel.state.inner import hooked
from echelon.parallel.state.partition import parameters_of
from echelon.world import agree

if TYPE_CHECKING:
    from echelon.loop.auto.prepared_unit import PreparedUnit

__all__ = ["add_again", "are_alike", "check_holds", "check_tracked", "look_at_first_update", "not_the_modules", "when_it_grows"]

_REMEDY = (
    "Nothing would be trained. Make the optimizer after the module is made parallel, from the parameters that it has then: in an "
    "AutoUnit, in configure_optimizers_and_lr_scheduler(module), from module.parameters()."
)
_IN_A_LOOP = (
    "Nothing would be trained. Before prepare(), make the optimizer from the parameters of the models that you give to prepare() "
    "with it."
)


def check_holds(unit: PreparedUnit, optimizer: Any) -> None:
    """Check a unit's optimizer, as `configure_optimizers_and_lr_scheduler` returned it or as the user assigned it.

    Raises:
        UsageError: it holds parameters that the module had before it was sharded, or none of the module's.
    """
    reshard(unit.prepared.module)  # a pass whose backward pass never came leaves gathered parameters
    if isinstance(optimizer, torch.optim.Optimizer):
        hooked(optimizer)
    if overrides().observes or not isinstance(optimizer, torch.optim.Optimizer):
        return
    trains = any(p.requires_grad for p in unit.prepared.module.parameters())
    # One of several optimizers may hold only parameters outside the module, such as a temperature.
    what = f"{_before(unit)}the {type(optimizer).__name__}"
    problem = _wrong_with(unit, what, parameters_of(optimizer), (), must_hold_some=trains and not unit.has_several)
    if problem is not None:
        raise OptimizerError(f"{problem} {_remedy(unit)}")


def look_at_first_update(unit: PreparedUnit, optimizer: torch.optim.Optimizer, *, together: bool) -> RemovableHandle | None:
    """Refuse an optimizer whose parameters have no gradient in the first update: none at all, or none of those that look like a
    copy's. Once; collective if `together`. Remove the hook after that update."""
    if overrides().observes:
        return None
    strangers = _strangers(unit, before := parameters_of(optimizer))
    copies = strangers if _are_shaped_as(strangers, _left(unit.prepared.module, before)) else []
    looked = False  # a hook cannot remove itself

    def look(*_: Any) -> None:
        nonlocal looked
        if looked:
            return
        looked = True
        for held, whose in ((parameters_of(optimizer), ""), (copies, " that are outside the module but shaped like its own")):
            meets = not held or any(p.grad is not None for p in held)
            if not (agree.any_rank(meets) if together else meets):
                raise OptimizerError(
                    f"{_before(unit)}none of the {_count(held)} of the {type(optimizer).__name__}{whose} has a gradient "
                    f"in the first update. {_remedy(unit)}"
                )

    return optimizer.register_step_pre_hook(look)


def _before(unit: Any) -> str:
    """Beginning of a message about the unit's optimizer."""
    return "" if is_own_loop(unit) else f"{type(unit).__name__}: "


def _remedy(unit: Any) -> str:
    return _IN_A_LOOP if is_own_loop(unit) else _REMEDY


def _strangers(unit: Any, held: list[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters of an optimizer that no attribute of the unit has."""
    reached = {id(p) for p in _within(vars(unit).values())}
    return [p for p in held if id(p) not in reached]


def _left(module: nn.Module, held: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Trained parameters of a module that are not in `held`."""
    ids = {id(p) for p in held}
    return [p for p in module.parameters() if p.requires_grad and id(p) not in ids]


def _are_shaped_as(strangers: Sequence[nn.Parameter], left: Sequence[nn.Parameter]) -> bool:
    """Whether the strangers' shapes are among those left: from before sharding, or from a copy of the module."""
    return any(p.numel() > 1 for p in strangers) and not Counter(p.shape for p in strangers) - Counter(p.shape for p in left)


def not_the_modules(unit: PreparedUnit, optimizer: Any) -> list[nn.Parameter]:
    """The optimizer's trained parameters that belong neither to the module nor to another parallel module of the unit."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    reduced = {id(p) for p in unit.prepared.module.parameters()}
    for prepared in unit.prepared_modules().values():
        if prepared.data.groups or prepared.forward_is_collective:
            reduced |= {id(p) for p in prepared.module.parameters()}
    rest = (p for p in parameters_of(optimizer) if id(p) not in reduced and not is_split(p))
    return [p for p in rest if p.requires_grad]


def when_it_grows(optimizer: Any, unit: Any) -> None:
    """Call `unit.optimizer_grew()`, and no other unit's, after each `add_param_group`, for which torch has no hook."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    before: Any = optimizer.add_param_group
    if isinstance(before, _Growing):
        before.unit = weakref.ref(unit)
        return
    # Weak, so that no cycle delays freeing the optimizer.
    add = weakref.WeakMethod(before) if inspect.ismethod(before) else lambda: before
    replace(optimizer, "add_param_group", "optimizer_checks", _Growing(add, weakref.ref(unit), []))


def add_again(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], unit: Any) -> None:
    """Add a group that the optimizer was given during training before a resume. If the script adds it again, nothing is added."""
    when_it_grows(optimizer, unit)
    optimizer.add_param_group({"params": parameters})
    growing: Any = optimizer.add_param_group
    growing.again.append({id(p) for p in parameters})


@dataclass
class _Growing:
    """An optimizer's `add_param_group` that tells a unit.

    Args:
        again: ids of the parameters of each group from `add_again`, which is not added a second time.
    """

    add: Callable[[], Callable[[dict[str, Any]], None] | None]
    unit: weakref.ref[Any]
    again: list[set[int]]

    def __call__(self, param_group: dict[str, Any]) -> None:
        if self.again and "params" in param_group:
            params = param_group["params"]
            params = [params] if isinstance(params, torch.Tensor) else list(params)
            if {id(p[1] if isinstance(p, tuple) else p) for p in params} in self.again:
                return
            param_group = {**param_group, "params": params}
        if (add := self.add()) is not None:
            add(param_group)
        grew = getattr(self.unit(), "optimizer_grew", None)
        if grew is not None:
            grew()


def check_tracked(unit: Any) -> list[Guard]:
    """Before a unit trains, check all optimizers and modules among its attributes. Collective.

    Returns:
        guards of all that the unit trains, and of the steps of a unit that steps by itself; on all ranks or on none.
    Raises:
        UsageError: on all ranks, if an optimizer on any rank holds parameters that a module had before it was sharded.
    """
    optimizers, modules = unit.tracked_optimizers(), unit.tracked_modules()
    problem = None if overrides().observes else _problem(unit, optimizers, modules)
    agree.raise_on_all(f"{problem} {_remedy(unit)}" if problem else None)
    for optimizer in optimizers.values():
        hooked(optimizer)
        if any(is_split(p) for p in parameters_of(optimizer)):
            step_by_kind(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            _searches_together(unit, optimizer)
    if not agree.is_joined():
        return []
    by_itself = unit.steps_by_itself and not overrides().observes
    return [*(watch(modules, optimizers.values()) if by_itself else ()), SameTrained(unit.prepared_modules())]


def _searches_together(unit: Any, optimizer: torch.optim.Optimizer) -> None:
    """Give LBFGS the loss averaged over the ranks, as its gradients are: the loss decides whether it calls the closure again."""
    ids = {id(p) for p in parameters_of(optimizer)}
    trained = [p for p in unit.prepared_modules().values() if any(id(each) in ids for each in p.module.parameters())]
    if not trained or trained[0].data.averaged_over == 1:
        return
    groups = trained[0].data.groups

    def average(optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = kwargs["closure"] if "closure" in kwargs else args[1]
        return None if isinstance(closure, _MeanLoss) else ((args[0], _MeanLoss(closure, groups)), {})

    optimizer.register_step_pre_hook(average)


@dataclass(frozen=True)
class _MeanLoss:
    """Calls a closure and averages its loss over the ranks."""

    closure: Callable[[], Any]
    groups: Iterable[dist.ProcessGroup | None]

    def __call__(self) -> torch.Tensor:
        mean: torch.Tensor = torch.as_tensor(self.closure()).detach().clone()
        for group in self.groups:
            dist.all_reduce(mean, group=group)
            mean /= dist.get_world_size(group)
        return mean


def _problem(unit: Any, optimizers: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> str | None:
    """Describe the first problem of an optimizer; None if there is none."""
    prepared = [each for name, each in unit.prepared_modules().items() if name in modules]
    for each in prepared:
        reshard(each.module)
    held = {name: parameters_of(optimizer) for name, optimizer in optimizers.items()}
    everywhere = [p for parameters in held.values() for p in parameters]
    left: list[nn.Parameter] = []  # parameters of sharded modules that no optimizer holds
    flat = False
    for each in prepared:
        if each.form.kind != "own":
            left += (left_here := _left(each.module, everywhere))
            flat = flat or (bool(left_here) and each.form.kind == "flat")
    own = is_own_loop(unit)
    called = {name: f"the {type(o).__name__}" if own else f"{type(unit).__name__}.{name}" for name, o in optimizers.items()}
    found = (_wrong_with(unit, called[name], each, left, must_hold_some=flat) for name, each in held.items())
    return next((problem for problem in found if problem is not None), None)


def _wrong_with(
    unit: Any, what: str, held: list[nn.Parameter], left: Sequence[nn.Parameter], *, must_hold_some: bool
) -> str | None:
    """Describe what is wrong with the parameters of an optimizer; None if nothing is.

    Args:
        what: the optimizer's name.
        left: parameters of the unit's sharded modules that no optimizer holds.
        must_hold_some: the optimizer, if not empty, must hold some of the unit's parameters.
    """
    old = [name for p in held if (name := name_before(p)) is not None]
    if old:
        return f"{what} holds {_count(held)}, {len(old)} of which are from before the module was sharded (first: {old[0]})."
    strangers = _strangers(unit, held)
    if _are_shaped_as(strangers, left) or (must_hold_some and len(strangers) == len(held) > 0):
        whose = "no model of the loop" if is_own_loop(unit) else "no module of the unit"
        return f"{what} holds {_count(strangers)} that {whose} has (first: {_shown(strangers[0])})."
    return None


def _within(values: Iterable[Any], depth: int = 3) -> Iterator[nn.Parameter]:
    """Parameters among attributes, and in lists, tuples and dicts of them."""
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, nn.Module):
            yield from value.parameters()
        elif depth and isinstance(value, (list, tuple, set)):
            yield from _within(value, depth - 1)
        elif depth and isinstance(value, dict):
            yield from _within(value.values(), depth - 1)


def are_alike(held: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    """Whether `held` has the shapes of `others`, as copies would."""
    return Counter(p.shape for p in held) == Counter(p.shape for p in others)


def _count(parameters: Sequence[nn.Parameter]) -> str:
    return "one parameter" if len(parameters) == 1 else f"{len(parameters)} parameters"


def _shown(parameter: nn.Parameter) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')} {tuple(parameter.shape)}"
