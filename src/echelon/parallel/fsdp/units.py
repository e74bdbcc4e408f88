"""What `fully_shard` splits and gathers one by one: the blocks, and around them what is not left to the root."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.common.arguments import mapping
from echelon.common.errors import LayoutError, require
from echelon.common.numbers import whole
from echelon.parallel.experts.distribute import divided_experts
from echelon.parallel.fsdp.compute_type import decides, in_full, policy_for
from echelon.parallel.fsdp.embedding_and_head import edges_of
from echelon.parallel.names import matching
from echelon.parallel.recipe.blocks import Blocks, blocks_to_shard, without_shared
from echelon.parallel.recipe.precision import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["Unit", "check_prefetch", "check_reshard", "expert_units", "experts_apart", "prefetch", "resharded", "units_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered and freed together.

    Args:
        name: of the module, or of the first of them.
        policy: mixed precision.
        reshard: after the forward, as in `fully_shard`.
        in_order: in the order of the forward pass, so that the one before it can prefetch it.
        is_read: perhaps elsewhere in the root's forward pass, see `embedding_and_head`.
        mesh: the ranks, if they are others than those of the rest.
        placement: how its parameters are cut, if it is not as the rest.
    """

    name: str
    modules: tuple[nn.Module, ...]
    policy: MixedPrecisionPolicy
    reshard: bool | int | None
    in_order: bool = True
    is_read: bool = False
    mesh: DeviceMesh | None = None
    placement: Callable[[nn.Parameter], Any] | None = None


def units_of(
    module: nn.Module,
    chosen: Blocks | None,
    precision: Precision | None,
    policy: MixedPrecisionPolicy | None,
    reshard: bool | int,
    device: torch.device,
    *,
    reports: bool,
) -> list[Unit]:
    """The units in the order in which they are split, without the root, which gets what they leave.

    Args:
        chosen: blocks, innermost first; None takes the repeated ones.
        precision, policy: see `compute_type`.
        reports: log what is chosen.
    """
    blocks, shared = without_shared(module, blocks_to_shard(module) if chosen is None else chosen)
    full = without_shared(module, in_full(module, device))[0] if decides(precision, policy) else []
    done = {part for _, part in full}
    units = [Unit(name, (part,), policy_for(part, None, policy), False, in_order=False, is_read=True) for name, part in full]
    embeddings, head = edges_of(module, blocks) if chosen is None else ([], [])
    embeddings = [(name, part) for name, part in embeddings if part not in done]
    head = [(name, part) for name, part in head if part not in done]
    units += [Unit(name, (part,), policy_for(part, precision, policy), reshard, is_read=True) for name, part in embeddings]
    units += [Unit(name, (b,), policy_for(b, precision, policy), reshard) for name, b in blocks if b not in done]
    if head:
        (name, last), together = head[-1], tuple(part for _, part in head)
        kept = False if reshard is True else reshard  # the backward pass begins with it
        units.append(Unit(name, together, policy_for(last, precision, policy), kept, is_read=True))
    if reports:
        around = [name for name, _ in embeddings] + ([" with ".join(name for name, _ in head)] if head else [])
        _report(blocks, shared, around, is_chosen=chosen is not None)
    return units


def experts_apart(module: nn.Module, precision: Precision | None, policy: MixedPrecisionPolicy | None) -> set[nn.Parameter]:
    """Parameters of experts that no other data-parallel rank has: there is nothing to gather and nothing to reduce.

    A unit over a single rank would copy them in each pass. Where they are computed in another type than they are kept in, one
    stays, to cast them.
    """
    return {
        parameter
        for _, part, dispatch in divided_experts(module)
        if dispatch.data_mesh.size() == 1 and policy_for(part, precision, policy).param_dtype is None
        for parameter in part.parameters()
    }


def expert_units(
    module: nn.Module,
    precision: Precision | None,
    policy: MixedPrecisionPolicy | None,
    reshard: bool | int,
    apart: Collection[nn.Parameter] = (),
) -> list[Unit]:
    """Experts that are divided over ranks: each is sharded over the ranks that have the same ones. They are split first.

    Args:
        apart: parameters of experts that are no units.
    """
    return [
        Unit(
            name,
            (part,),
            policy_for(part, precision, policy),
            reshard is not False,  # a number is one of the other mesh's ranks
            in_order=False,
            mesh=dispatch.data_mesh,
            placement=dispatch.placement,
        )
        for name, part, dispatch in divided_experts(module)
        if not any(parameter in apart for parameter in part.parameters())
    ]


def resharded(units: list[Unit], module: nn.Module, by_name: Mapping[str, bool | int]) -> list[Unit]:
    """The units with what the user says of them, by patterns of names; where several match, the first of them counts.

    Raises:
        UsageError: a pattern matches no unit.
    """
    names = {part: name for name, part in module.named_modules()}
    every = {names[part] for unit in units for part in unit.modules}
    found = {pattern: set(matching(pattern, every)) for pattern in by_name}
    for pattern, matched in found.items():
        if not matched:
            raise LayoutError(
                f"reshard_after_forward has {pattern!r}, which matches nothing that is sharded one by one: "
                f"{', '.join(sorted(every)) or 'the module is sharded as a whole'}."
            )
    made = []
    for unit in units:
        mine = {names[part] for part in unit.modules}
        said = [by_name[pattern] for pattern, matched in found.items() if matched & mine]
        made.append(replace(unit, reshard=said[0]) if said else unit)
    return made


def prefetch(units: list[Unit], forward: int, backward: int | None) -> None:
    """While one unit is computed, gather so many that follow; in the backward pass so many that were before.

    Args:
        backward: None is what `fully_shard` does by itself: one.
    """
    ordered = [unit.modules[0] for unit in units if unit.in_order]
    for i, part in enumerate(ordered):
        if following := ordered[i + 1 : i + 1 + forward]:
            part.set_modules_to_forward_prefetch(following)  # type: ignore[operator]
        if backward is not None and (before := ordered[max(0, i - backward) : i][::-1]):
            part.set_modules_to_backward_prefetch(before)  # type: ignore[operator]


def check_prefetch(forward: Any, backward: Any) -> None:
    """
    Raises:
        UsageError: forward_prefetch or backward_prefetch is no number of blocks.
    """
    if not isinstance(forward, bool):
        whole("forward_prefetch", forward, at_least=0, kind=LayoutError)
    if backward is not None:
        whole("backward_prefetch", backward, at_least=1, or_none="for what fully_shard does", kind=LayoutError)


def check_reshard(value: Any) -> None:
    """
    Raises:
        UsageError: reshard_after_forward is nothing that `fully_shard` takes, nor that by names.
    """
    each = mapping("reshard_after_forward", value, kind=LayoutError).values() if isinstance(value, Mapping) else (value,)
    allowed = int if isinstance(value, Mapping) else int | None
    what = "True, False, a number of ranks, a dict of these by names, or None"
    require(all(isinstance(one, allowed) for one in each), "reshard_after_forward", what, value, kind=LayoutError)


def _report(blocks: Blocks, shared: list[str], around: list[str], *, is_chosen: bool) -> None:
    if shared:
        logger.warning("blocks that share parameters with others are split with the root: %s", ", ".join(shared))
    if not is_chosen:
        kinds = [f"{n} {kind}" for kind, n in Counter(type(b).__name__ for _, b in blocks).items()]
        parts = ", ".join([*kinds, *around])
        logger.info(
            "sharding %s", f"{parts} one by one, then the rest" if blocks else "the whole module at once: no blocks repeat"
        )
