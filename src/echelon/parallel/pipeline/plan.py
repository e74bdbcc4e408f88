"""How a module is cut into stages: first all checks, before any rank waits for another, and then the cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import PipelineError
from echelon.hf.layers import layer_drop
from echelon.parallel.names import names_of_each, plain_name
from echelon.parallel.pipeline.gates import cut, kept_by
from echelon.parallel.pipeline.pipeline import Pipeline, Shared
from echelon.parallel.pipeline.schedules import Kind, kind_named, stage_ranks
from echelon.parallel.pipeline.stages import Splits, Unit, check_splits, units_of
from echelon.parallel.recipe.activation import ActivationCheckpointParams
from echelon.parallel.shards import set_apart
from echelon.world.timeout import inherit_timeout

__all__ = ["Stages", "cut_into_stages", "plan_stages", "refuse_recomputed"]


@dataclass(frozen=True)
class Stages:
    """A plan of the stages; the module is not changed yet.

    Args:
        ranks: by stage, the rank along the pipeline that has it.
        shared: by first name, the parameters that several ranks use, with these ranks.
    """

    kind: Kind
    units: list[Unit]
    ranks: list[int]
    shared: dict[str, list[int]]


def plan_stages(module: nn.Module, stages: Splits | None, schedule: str, pp: int) -> Stages:
    """Decide where to cut. The same on all ranks; not collective.

    Args:
        stages: names of the modules at which further stages begin, or for each stage the names of its modules; None balances
            the repeated blocks by their parameters.
        schedule: a name of `SCHEDULES`.
        pp: ranks along the pipeline.
    Raises:
        UsageError: the module cannot be cut like this, or a pipeline would change what it computes.
    """
    kind, splits = kind_named(schedule), check_splits(stages)
    per_rank = kind.per_rank if splits is not None else kind.per_rank or kind.default
    units = units_of(module, splits, pp, per_rank)
    ranks = stage_ranks(kind, units[-1].stage + 1, pp)
    _refuse_hooks(module, units)
    if (left_out := layer_drop(module)) is not None:
        name, often = left_out
        raise PipelineError(
            f"{type(module).__name__} leaves out layers at random ({name}={often}), and the stages of a pipeline, each of which "
            f"draws for itself, would leave out different ones. Set {name}=0."
        )
    names = {id(p): names[0] for p, names in names_of_each(module.named_parameters(remove_duplicate=False)).items()}
    holders: dict[str, list[int]] = {}
    for rank in range(pp):
        own = [stage for stage, at in enumerate(ranks) if at == rank]
        for name in {names[each] for each in kept_by(module, units, own) if each in names}:
            holders.setdefault(name, []).append(rank)
    return Stages(kind, units, ranks, {name: at for name, at in sorted(holders.items()) if len(at) > 1})


def cut_into_stages(module: nn.Module, plan: Stages, group: dist.ProcessGroup, device: torch.device) -> Pipeline:
    """Remove the parameters and buffers of other ranks' stages. Collective over the ranks of the pipeline."""
    me = dist.get_rank(group)
    own = [stage for stage, rank in enumerate(plan.ranks) if rank == me]
    made = cut(module, plan.units, own, device)
    set_apart(module, group)
    members = dist.get_process_group_ranks(group)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(len(members))): group}
    for ranks in sorted({tuple(ranks) for ranks in plan.shared.values() if me in ranks}):
        if ranks not in groups:
            groups[ranks] = dist.new_group([members[rank] for rank in ranks], use_local_synchronization=True)
            inherit_timeout(groups[ranks])
    shared = {name: groups[tuple(ranks)] for name, ranks in plan.shared.items() if me in ranks}
    return Pipeline(module, made, plan.kind, plan.ranks, group, Shared(shared))


def refuse_recomputed(module: nn.Module, plan: Stages, recomputed: ActivationCheckpointParams | None) -> None:
    """Refuse to recompute modules that span several stages: the backward pass would call them again, outside of the schedule."""
    chosen = recomputed.chosen(module) if recomputed is not None else []
    for name in (name for name, part in _spanning(module, plan.units) if any(part is each for each in chosen)):
        raise PipelineError(
            f"recompute must choose modules that lie in one stage of the pipeline, got {name}, which spans several. Use "
            "recompute='blocks', or choose modules within the blocks."
        )


def _refuse_hooks(module: nn.Module, units: list[Unit]) -> None:
    """Refuse hooks of modules that span several stages: in most stages the calls of such a module do not end."""
    for name, part in _spanning(module, units):
        kinds = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
        if hook_kinds := [kind for kind in kinds if getattr(part, kind, None)]:
            raise PipelineError(
                f"{name} has hooks ({', '.join(kind.strip('_').replace('_', ' ') for kind in hook_kinds)}), and spans several "
                "stages: a pipeline would not run them. Register them on a module that lies in one stage."
            )


def _spanning(module: nn.Module, units: list[Unit]) -> Iterator[tuple[str, nn.Module]]:
    """The modules that span several stages, with their names."""
    inside = {part for unit in units for part in unit.module.modules()}
    for name, part in module.named_modules():
        name = plain_name(name)
        if part not in inside and any(unit.name.startswith(f"{name}.") or not name for unit in units):
            yield f"{type(module).__name__}.{name}" if name else type(module).__name__, part
