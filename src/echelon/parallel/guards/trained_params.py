"""Checks that all ranks train the same parameters while layers are frozen and unfrozen.

What ranks send in a backward pass depends on which parameters are trained, so the pass fails or hangs if only some ranks change
that: for example if each rank unfreezes a layer by its own loss (tests/parallel/test_local_states.py).

A rank sees only its own changes. It reports them when ranks communicate anyway: after a step or an epoch, or in the window's
message before a backward pass. If no rank reports a change, there was none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from echelon.common.errors import LayoutError, RanksDisagreeError
from echelon.contracts.overrides import overrides
from echelon.parallel.guards.guard import Guard
from echelon.parallel.shards import ranks_apart, reshard
from echelon.world import agree

__all__ = ["SameTrained", "name_before", "refuse_unheard", "replaced"]


class SameTrained(Guard):
    """Compares which parameters all ranks train in the modules that they share, and records what they have agreed on.

    Otherwise replicas would silently drift apart, or shards of one parameter be trained differently, or a backward pass would
    wait for gradients of other ranks.

    Args:
        modules: a unit's modules, as `Prepared`, by attribute name.
    """

    def __init__(self, modules: Mapping[str, Any]) -> None:
        named = _named(_shared(modules))  # not the modules themselves, which hold this guard: it would be a reference cycle
        self._names, self._parameters = list(named), list(named.values())
        self._agreed = self._now()
        for prepared in modules.values():
            prepared.guards[:] = [*(each for each in prepared.guards if not isinstance(each, SameTrained)), self]

    def _now(self) -> list[bool]:
        return [p.requires_grad for p in self._parameters]

    @property
    def in_doubt(self) -> bool:  # type: ignore[override]
        return self._now() != self._agreed

    def compare(self) -> None:
        now = self._now()
        every = agree.unless_same("which parameters were frozen or unfrozen", self._changed(now))
        if every is not None:
            other = next(rank for rank, each in enumerate(every) if each != every[0])
            name = next(n for n in self._names if (n in every[0]) != (n in every[other]))
            raise self._differs(name, *((0, other) if name in every[0] else (other, 0)))
        self._agreed = now

    def differs_from_some(self) -> RanksDisagreeError:
        return self._differs(self._changed(self._now())[0], agree.rank(), None)

    def _changed(self, now: list[bool]) -> list[str]:
        return [name for name, a, b in zip(self._names, now, self._agreed, strict=True) if a != b]

    def _differs(self, name: str, rank: int, there: int | None) -> RanksDisagreeError:
        did = "frozen" if self._agreed[self._names.index(name)] else "unfrozen"
        other = "another" if there is None else f"rank {there}"
        return RanksDisagreeError(
            f"ranks that share a model must train the same parameters of it, but {name} was {did} on rank {rank} and not on "
            f"{other}. Freeze and unfreeze the same parameters on all ranks, at the same step."
        )

    def begin_epoch(self, modules: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        shared = _shared(modules)
        names_by_state: dict[str, list[Any]] = {}
        ids = {id(p) for each in shared.values() for p in (*each.module.parameters(), *each._others)}
        for name, optimizer in optimizers.items() if shared else ():
            groups = getattr(optimizer, "param_groups", [])
            held = {id(p) for group in groups for p in group["params"]}  # a partitioned optimizer may hold none on this rank
            if not held or not ids.isdisjoint(held):  # else the optimizer trains this rank's own parameters only
                rates = [float(g["lr"]) for g in groups if isinstance(g.get("lr"), (int, float, torch.Tensor))]
                names_by_state[name] = [type(optimizer).__name__, *rates]
        kinds = agree.kinds([names_by_state, [n for n, p in _named(shared).items() if not p.requires_grad]])
        if len(kinds) == 1:
            return
        (optimizers_here, first), (others, second) = kinds[:2]
        for name in {**optimizers_here, **others}:
            one, another = optimizers_here.get(name, ["none"]), others.get(name, ["none"])
            if one != another:
                raise RanksDisagreeError(
                    f"ranks that share a model must have the same optimizer, but {name} is {_told(one)} on one rank and "
                    f"{_told(another)} on another. Make the same optimizer with the same groups on all ranks, and change its lr "
                    "alike."
                )
        differ = sorted(set(first) ^ set(second))
        raise RanksDisagreeError(
            "ranks that share a model must train the same parameters of it, but "
            f"{differ[0] if differ else 'some'} is frozen on one rank and trained on another. Freeze and unfreeze the same "
            "parameters on all ranks."
        )


def _shared(modules: Mapping[str, Any]) -> dict[str, Any]:
    """The modules, by attribute name, whose parameters all ranks train alike."""
    shared = {name: each for name, each in modules.items() if each.data.groups or each.forward_is_collective}
    # Stages, flat parameters and divided layers: the parameters differ by rank.
    own = (p.place.stages or p.form.kind == "flat" or ranks_apart(p.module) is not None for p in shared.values())
    return {} if overrides().observes or any(own) else shared


def _named(shared: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    for prepared in shared.values():
        reshard(prepared.module)
    return {f"{name}.{n}": p for name, each in shared.items() for n, p in each.named_parameters()}


def _told(optimizer: list[Any]) -> str:
    kind, *rates = optimizer
    shown = ", ".join(f"{rate:g}" for rate in rates[:8])
    return f"{kind} (lr of its groups: {shown}{', ...' if len(rates) > 8 else ''})" if rates else str(kind)


# Parameters that a layout has replaced, for example by shards: code that would keep using the old ones is refused.
#
# An optimizer made before holds the old parameters and would train nothing (tests/parallel/test_stale_optimizer.py). A hook that
# clips gradients by `p.register_hook(...)` would never be called (tests/parallel/test_strategy_limits.py).

_names = WeakTensorKeyDictionary()  # names of replaced parameters, which no module knows any more

_REMEDY = (
    "To change gradients before they are used, call optimizer.register_step_pre_hook(...), which sees the update's gradients, or "
    "train under 'ddp' or 'zero1', which keep parameters as they are."
)


def replaced(before: Iterable[tuple[str, nn.Parameter]], after: Mapping[str, nn.Parameter], layout: str) -> None:
    """Remember the names of replaced parameters.

    Args:
        before: a module's parameters by name, before it was made parallel.
        after: its parameters afterwards, without those that only other ranks hold.
    Raises:
        UsageError: a parameter with an autograd hook was replaced.
    """
    kept = {id(parameter) for parameter in after.values()}
    for name, parameter in before:
        if id(parameter) not in kept:  # kept under another name is not replaced
            _names[parameter] = name
        if after.get(name, parameter) is not parameter and _is_hooked(
            parameter, "_backward_hooks", "_post_accumulate_grad_hooks"
        ):
            raise LayoutError(
                f"layout {layout!r} replaces the parameter {name}, whose hook (register_hook, or "
                f"register_post_accumulate_grad_hook) would never be called. Remove the hook first. {_REMEDY}"
            )


def name_before(parameter: nn.Parameter) -> str | None:
    """The name that a replaced parameter had in its module; None if the parameter was not replaced."""
    name: str | None = _names.get(parameter)
    return name


def refuse_unheard(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """
    Args:
        named: shards of `fully_shard`, whose gradients torch sets outside of autograd.
    Raises:
        UsageError: a shard has a hook that only autograd would call.
    """
    for name, parameter in named:
        if _is_hooked(parameter, "_backward_hooks"):
            raise LayoutError(
                f"{name} is split over the ranks, and torch does not call its hook (register_hook). Its gradient is set after "
                f"the backward pass: register_post_accumulate_grad_hook is called then, with this rank's part. {_REMEDY}"
            )


def _is_hooked(parameter: nn.Parameter, *kinds: str) -> bool:
    return any(getattr(parameter, kind, None) for kind in kinds)
