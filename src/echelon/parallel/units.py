"""What `fully_shard` splits and gathers one by one: the blocks, and around them what is not left to the root."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from echelon.parallel.blocks import Blocks, blocks_to_shard, without_shared
from echelon.parallel.compute_type import decides, in_full, policy_for
from echelon.parallel.edges import edges_of
from echelon.parallel.precision import Precision

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["Unit", "units_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered and freed together.

    Args:
        name: of the module, or of the first of them.
        policy: mixed precision.
        reshard: after the forward, as in `fully_shard`.
        in_order: in the order of the forward pass, so that the one before it can prefetch it.
        is_edge: see `edges`.
    """

    name: str
    modules: tuple[nn.Module, ...]
    policy: MixedPrecisionPolicy
    reshard: bool | int | None
    in_order: bool = True
    is_edge: bool = False


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
    units = [Unit(name, (part,), policy_for(part, None, policy), False, in_order=False) for name, part in full]
    embeddings, head = edges_of(module, blocks) if chosen is None else ([], [])
    head = [(name, part) for name, part in head if part not in done]
    units += [Unit(name, (part,), policy_for(part, precision, policy), reshard, is_edge=True) for name, part in embeddings]
    units += [Unit(name, (b,), policy_for(b, precision, policy), reshard) for name, b in blocks if b not in done]
    if head:
        (name, last), together = head[-1], tuple(part for _, part in head)
        kept = False if reshard is True else reshard  # the backward pass begins with it
        units.append(Unit(name, together, policy_for(last, precision, policy), kept, is_edge=True))
    if reports:
        around = [name for name, _ in embeddings] + ([" with ".join(name for name, _ in head)] if head else [])
        _report(blocks, shared, around, is_chosen=chosen is not None)
    return units


def _report(blocks: Blocks, shared: list[str], around: list[str], *, is_chosen: bool) -> None:
    if shared:
        logger.warning("blocks that share parameters with others are split with the root: %s", ", ".join(shared))
    if not is_chosen:
        kinds = [f"{n} {kind}" for kind, n in Counter(type(b).__name__ for _, b in blocks).items()]
        parts = ", ".join([*kinds, *around])
        logger.info(
            "sharding %s", f"{parts} one by one, then the rest" if blocks else "the whole module at once: no blocks repeat"
        )
