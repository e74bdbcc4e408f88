"""Check that the ranks did the same, and that the replicas of a model are still equal: at a save, at the end, and for replicas
also before and after the first step.

Gradients are averaged, not parameters. If a script draws noise into weights, sets them from its first batch, or changes weights
or a learning rate on rank 0 only, the ranks' models drift apart, and only rank 0's is saved. Communication: one all-reduce per
axis of replicas, of four numbers per parameter.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.loop.unit import Unit
from echelon.parallel.prepared import Prepared
from echelon.parallel.shards import is_split, local, reshard
from echelon.world import agree

__all__ = ["check_ranks", "seen", "warn_of_drift"]

logger = logging.getLogger(__name__)

# Relative to a parameter's norm; far above rounding differences between devices of a mixed cluster.
_TOLERANCE = 1e-3
# Elements compared of each parameter, at most: their float64 copy takes more memory than they do.
_MOST = 1 << 20

# Modules that were reported.
_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_ranks(unit: Unit) -> None:
    """Settle the guards, and warn of replicas that have drifted apart. Collective.

    Raises:
        RanksDisagreeError: the latest update mixed gradients of different parameters.
    """
    for prepared in unit.prepared_modules().values():
        for guard in prepared.guards:
            guard.settle()
    warn_of_drift(unit)


def warn_of_drift(unit: Unit) -> None:
    """Compare parameters that every rank of an axis holds; shards have no replicas. Collective."""
    modules = unit.prepared_modules()
    _warn_of_own_models({name: p for name, p in modules.items() if not p.data.groups and not p.data.is_divided})
    for name, prepared in modules.items():
        if not prepared.data.groups or prepared.form.kind == "flat" or prepared.module in _told:
            continue
        reshard(prepared.module)
        copies = _copies(prepared)
        if copies or prepared.place.stages:  # else every parameter is sharded, on every rank
            _compare(name, prepared, copies, _DRIFTED)


def _warn_of_own_models(modules: dict[str, Prepared[Any]]) -> None:
    """Compare modules without a layout, which the script may keep equal by hand. They may differ on purpose. Collective."""
    if not modules or not agree.is_joined():
        return
    trained = {
        name: list(_floats(p))
        for name, p in modules.items()
        # of a copy that prepare() has split, such as an average, the ranks hold other parts
        if any(q.requires_grad and not is_split(q) for _, q in p.named_parameters())
    }
    if agree.is_same([[name, [[of, list(p.shape)] for of, p in floats]] for name, floats in trained.items()]):
        for name, floats in trained.items():
            if floats:
                _compare(name, modules[name], {None: floats}, _OWN_MODEL)


_DRIFTED = (
    "the ranks hold different values of %s.%s (one of %s parameters), which must be copies; rank 0's are saved. "
    "Change parameters and learning rates in the same way on all ranks: noise from a torch.Generator with the same seed, "
    "what a batch or a metric decides by `ech.all_mean(...)`, no `if rank == 0`. `echelon prove` finds where they begin to differ"
)
_OWN_MODEL = (
    "each rank trains its own model: the ranks hold different values of %s.%s (one of %s parameters), and nothing averages "
    "gradients; rank 0's are saved. Give layout='ddp' or another layout; in a TrainUnit, `echelon.layouts.prepare_module(...)`"
)


def _compare(name: str, prepared: Prepared[Any], copies: dict[Any, list[tuple[str, torch.Tensor]]], message: str) -> None:
    """Compare copies within their groups of ranks, and report the first that differ. Collective."""
    if prepared.module in _told:
        return
    drifted: dict[str, None] = {}
    for group, parameters in copies.items():
        drifted |= dict.fromkeys(_differing(parameters, group))
    # Agreed by all ranks: ranks that had reported it alone would skip the next comparison and leave the others waiting.
    if (first := agree.first_not_none([next(iter(drifted)), len(drifted)] if drifted else None)) is not None:
        _told.add(prepared.module)
        if agree.is_rank0():
            logger.error(message, name, *first)


def _floats(prepared: Prepared[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's part of each floating-point parameter; low-bit tensors have no sum."""
    for name, parameter in prepared.named_parameters():
        piece = local(parameter.detach())
        if piece.is_floating_point() and not piece.is_meta and type(piece) is torch.Tensor:
            yield name, piece


def _copies(prepared: Prepared[Any]) -> dict[Any, list[tuple[str, torch.Tensor]]]:
    """For each group of ranks, the parameters or shards that all of its ranks hold."""
    copies: dict[Any, list[tuple[str, torch.Tensor]]] = {}
    of_name = dict(prepared.named_parameters())
    for name, piece in _floats(prepared):
        parameter, groups = of_name[name], list[Any](prepared.data.groups)
        if is_split(parameter):
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            groups = [mesh.get_group(axis) for axis, placed in enumerate(placements) if placed.is_replicate()]
        for group in groups:
            copies.setdefault(group, []).append((name, piece))
    return copies


def _differing(parameters: list[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None) -> list[str]:
    """Names of the parameters that differ within the group. Collective over the group."""
    channel, device = agree.channel(group)
    each = [seen(p) for _, p in parameters]
    numbers = torch.stack(each if len({s.device for s in each}) == 1 else [s.to(device) for s in each])  # (parameters, 2)
    extremes = torch.cat([numbers, -numbers]).to(device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=channel)
    most, least = extremes.chunk(2)
    differs = (most + least).amax(1) > _TOLERANCE * most[:, 1]
    return [name for (name, _), different in zip(parameters, differs.tolist(), strict=True) if different]


@torch.no_grad()
def seen(parameter: torch.Tensor) -> torch.Tensor:
    """Two numbers of a tensor: its product with fixed numbers, and its norm."""
    flat = parameter.reshape(-1)[:_MOST].double()
    fixed = torch.linspace(-1, 1, len(flat) + 1, dtype=flat.dtype, device=flat.device)[1:]
    return torch.stack([flat @ fixed, flat.norm()])
