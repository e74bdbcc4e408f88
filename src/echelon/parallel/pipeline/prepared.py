"""How a module is cut into stages, and what that changes of a `Prepared`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import PipelineError
from echelon.hf.layer_drop import layer_drop
from echelon.parallel.gradients import clip
from echelon.parallel.micro_batch import MicroBatch
from echelon.parallel.names import names_of_each, plain_name
from echelon.parallel.pipeline.gates import cut, kept_by
from echelon.parallel.pipeline.pipeline import Pipeline
from echelon.parallel.pipeline.schedules import Kind, kind_named, stage_ranks
from echelon.parallel.pipeline.shared import Shared
from echelon.parallel.pipeline.stages import Splits, Unit, check_splits, units_of
from echelon.parallel.prepared import Prepared
from echelon.parallel.state.stage_group import set_apart
from echelon.world import agree
from echelon.world.timeout import inherit_timeout

__all__ = ["Pipelined", "Stages", "StagesPrepared", "cut_into_stages", "plan_stages"]

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741
R = TypeVar("R")
Made = tuple[torch.Tensor, Any]


@dataclass(frozen=True)
class Stages:
    """A plan: nothing is changed yet.

    Args:
        ranks: by stage, the rank along the pipeline that has it.
        shared: the parameters that several of these ranks use, by their first names, and the ranks.
    """

    kind: Kind
    units: list[Unit]
    ranks: list[int]
    shared: dict[str, list[int]]


def plan_stages(module: nn.Module, stages: Splits | None, schedule: str, pp: int) -> Stages:
    """Decide where to cut. The same on all ranks; not collective.

    Args:
        stages: names of the modules at which further stages begin, or of each stage the names of what is in it; None balances
            the repeated blocks by their parameters.
        schedule: a name of `SCHEDULES`.
        pp: ranks along the pipeline.
    Raises:
        UsageError: the module cannot be cut so, or a pipeline would lose something of it.
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
    """Take from the module what other ranks' stages hold. Collective over the ranks of the pipeline."""
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


def _refuse_hooks(module: nn.Module, units: list[Unit]) -> None:
    """Of modules that lie in several stages, whose calls do not end in most of them."""
    inside = {part for unit in units for part in unit.module.modules()}
    for name, part in module.named_modules():
        name = plain_name(name)
        split = any(unit.name.startswith(f"{name}.") or not name for unit in units) and part not in inside
        kinds = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
        if split and (found := [kind for kind in kinds if getattr(part, kind, None)]):
            what = f"{type(module).__name__}.{name}" if name else type(module).__name__
            raise PipelineError(
                f"{what} has hooks ({', '.join(kind.strip('_').replace('_', ' ') for kind in found)}), and lies in several "
                "stages: a pipeline would lose them. Register them with a module that lies in one."
            )


class Pipelined(Prepared[Any]):
    """A `Prepared` that may have a pipeline.

    Attributes:
        pipeline: None where all ranks have all layers.
    """

    pipeline: Pipeline | None = None

    @property
    def is_trying(self) -> bool:  # type: ignore[override]
        return self.pipeline is not None and self.pipeline.is_trying

    def pipe(self, pipeline: Pipeline | None) -> None:
        """Once, when the module has its final form. Collective."""
        if pipeline is None:
            return
        self.pipeline, self.takes_windows, self.stages = pipeline, True, [pipeline.group]
        pipeline.shared.bind(self.named_parameters())
        pipeline.shared.equalize()

    def trains_also(self, others: list[nn.Parameter]) -> None:
        super().trains_also(others)
        if self.pipeline is None:
            return
        if others:
            raise PipelineError(
                f"the optimizer must hold the module's parameters only in a pipeline, got {len(others)} others, which only the "
                "last stage would train. Make them part of the module."
            )
        self.pipeline.shared.equalize()

    def optimizer(self, make: Callable[[nn.Module], O]) -> O:
        if self.pipeline is None:
            return super().optimizer(make)
        made, problem = None, None
        try:
            made = super().optimizer(make)
        except ValueError as error:  # torch's, of an optimizer without parameters; the other stages must not wait
            problem = f"{error}"
        if (told := next((each for each in agree.gather(problem) if each is not None), None)) is not None:
            raise PipelineError(
                f"the optimizer of a stage cannot be made: {told}. In a pipeline each rank has the parameters of its own stages, "
                "of which none may be trained: give it module.parameters() with the frozen ones, which it leaves alone."
            )
        assert made is not None
        return made

    def forward(self, batch: B, forward: Callable[[B], R]) -> R:
        if self.pipeline is None:
            return super().forward(batch, forward)
        made: R = self.pipeline.evaluate(batch, forward)
        return made

    def forward_backward_window(
        self,
        micro_batches: Sequence[MicroBatch[Any]],
        forward: Callable[[MicroBatch[Any]], Made],
        backward: Callable[[torch.Tensor, MicroBatch[Any]], None],
    ) -> list[Made]:
        if self.pipeline is None:
            return super().forward_backward_window(micro_batches, forward, backward)
        several = len(self.pipeline.cut.own) > 1
        self.passes_begin(several=several)
        before = (lambda last, number: self.backward_begins(last=last, number=number, several=several)) if self.averaged else None
        made = self.pipeline.window(micro_batches, forward, backward, before, share=self.wants_outputs)
        self.passes_end()
        self._reduces = True
        if self._loose or self._frozen:
            self._average_loose()
        return made

    def passes_begin(self, *, several: bool) -> None:
        """Before a schedule's first forward pass of a window. `several`: this rank has several stages of a pipeline."""

    def backward_begins(self, *, last: bool, number: int, several: bool) -> None:
        """Before each backward pass that a schedule calls: as `accumulate`. `last` of its stage, after `number` others."""

    def passes_end(self) -> None:
        """After a schedule's last backward pass of a window."""

    def fix_order(self) -> None:
        if self.pipeline is not None:
            raise PipelineError("bit-equal training has no pipeline. Use pp=1.")
        super().fix_order()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        if self.pipeline is None:
            return super().clip_grad_norm_(max_norm, norm_type)
        elsewhere = self.pipeline.shared.elsewhere
        return clip.clip_by_norm_(self.module.parameters(), max_norm, norm_type, beside=self.stages, elsewhere=elsewhere)


class StagesPrepared(Pipelined):
    """A pipeline, and nothing else: each rank has its stages' parameters whole."""

    forward_is_collective = True

    def __init__(self, module: nn.Module, pipeline: Pipeline) -> None:
        super().__init__(module)
        self.pipe(pipeline)

    def find_replicas(self) -> None:
        assert self.pipeline is not None
        self.is_replica = not self.pipeline.has_last
