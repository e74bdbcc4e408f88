"""Trace two updates of an unchanged script, as one rank of a world that need not exist."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from echelon.common.errors import PlanError
from echelon.contracts.overrides import Overrides
from echelon.contracts.rank import RankInfo
from echelon.loop.auto.auto import AutoUnit
from echelon.loop.auto.optimized_unit import OptimizedUnit
from echelon.loop.callback import Callback
from echelon.loop.records.utilization import tokens_of
from echelon.loop.samples import samples_of
from echelon.loop.state import State
from echelon.loop.target import Enough, Target
from echelon.parallel.experts.distribute import count, stacked_experts
from echelon.parallel.fsdp.fsdp import FSDPStrategy, offload_policy
from echelon.parallel.layouts import resolve, with_options_of
from echelon.parallel.names import class_name
from echelon.parallel.prepared import MicroBatch, Prepared
from echelon.parallel.recipe.activation import ActivationCheckpointParams
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.strategy import NOOPStrategy, Strategy
from echelon.planner.devices import Device
from echelon.planner.pretended import NoMemory, buckets_of, pretended_world, ranks_of, without_values
from echelon.planner.stand_ins import stand_ins
from echelon.planner.steps import tensors_in
from echelon.planner.trace import Trace, Traced
from echelon.world.init import World

__all__ = ["Model", "Planned", "trace_update"]


@dataclass(frozen=True)
class Planned:
    """An update of a script under a layout, on one rank.

    Args:
        model: the model that the script trains.
        ranks: number of ranks of the world.
        traced: what the rank holds, sends and computes.
        read: number of tensor values that the script read in an update; they were made up.
        samples, tokens: of an update, on all ranks; 0 tokens if its batches have no rows of whole numbers.
        micro_batches: of an update on a rank.
        is_compiled: the script compiles the module; the trace does not.
        pipeline: the ranks with the stages of this rank's model, including itself; empty without a pipeline.
        counted: number of micro-batches that were traced.
    """

    model: Model
    ranks: int
    traced: Traced
    read: int
    samples: int
    tokens: int
    micro_batches: int
    is_compiled: bool
    pipeline: tuple[int, ...]
    counted: int


@dataclass(frozen=True)
class Model:
    """The model that a script gives echelon to train.

    Args:
        layout: its layout, as written for `layout=`.
        name: the module's class.
        parameters, parameter_bytes: number and bytes of all parameters.
        experts: the largest number that divides the experts of each layer of experts; 0 without experts.
        by_hand: the script itself made it parallel, so no other layout can be tried.
    """

    layout: str
    name: str
    parameters: int
    parameter_bytes: int
    experts: int = 0
    by_hand: bool = False

    def beside(self, other: Model) -> Model:
        """Both models as one."""
        return replace(
            self,
            name=f"{self.name}, {other.name}",
            parameters=self.parameters + other.parameters,
            parameter_bytes=self.parameter_bytes + other.parameter_bytes,
            experts=math.gcd(self.experts, other.experts),
        )

    @classmethod
    def of(cls, layout: str, modules: Sequence[nn.Module], **more: Any) -> Model:
        """The model of modules that are trained together, named after the first."""
        parameters = {id(p): p for module in modules for p in module.parameters()}.values()
        size = sum(p.numel() * p.element_size() for p in parameters)
        return cls(layout, class_name(modules[0]), sum(p.numel() for p in parameters), size, **more)


@dataclass
class _WithoutValues(Strategy):
    """Takes a module's memory away before the real layout prepares it."""

    real: Strategy
    mode: NoMemory
    recompute: bool
    tell: Callable[[Model], None]

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.real.name

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        self.tell(Model.of(self.name, [module], experts=math.gcd(*map(count, stacked_experts(module).values()))))
        without_values(module, self.mode)
        if self.recompute:
            recipe = replace(recipe, activation_checkpoint=ActivationCheckpointParams.of("blocks", "recompute"))
        return self.real.prepare(module, world, recipe)


def trace_update(
    target: Target,
    layout: str | None,
    ranks: int,
    *,
    per_node: int = 8,
    accumulation: int | None = None,
    recompute: bool = False,
    offload: bool = False,
    precision: str | None = None,
    planned_ranks: int | None = None,
    shapes: Mapping[str, int] | None = None,
    device: Device | None = None,
    budget: int | None = None,
    rank: int = 0,
    tell: Callable[[Model], None] = lambda model: None,
) -> Planned:
    """Run the script until its second update has ended, as one rank of `ranks`, with a model that has no memory.

    Nothing is compiled. Call this only in a process of its own that ends afterwards: a script changes its process for good.

    Args:
        layout: replaces the script's own.
        per_node: number of ranks of a node.
        accumulation: number of micro-batches of an update on each rank; replaces the script's own.
        recompute: recompute repeated blocks in the backward pass, instead of what the script recomputes.
        offload: keep shards of the state in the host's memory.
        precision: replaces the script's own.
        planned_ranks: the largest number of ranks in `echelon run --ranks MIN:MAX`.
        shapes: see `NoMemory`.
        device, budget: the device that the script is told of, and its bytes of memory.
        tell: called with the model before it is traced.
    Raises:
        PlanError: the script gives echelon no module to train, or trains for fewer than two updates.
        UsageError: training would be refused for the same reason.
    """
    on_node = min(per_node, ranks)
    gpus = on_node if device is None or device.overlaps else 0
    info = RankInfo(rank=rank, local_rank=rank % on_node, world_size=ranks, local_world_size=on_node, run_id="plan")
    os.environ.update({**info.to_env(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    os.environ["WANDB_MODE"] = "disabled"  # a plan must not wait for a tracker's server
    with pretended_world(ranks, rank, shapes) as mode:
        watcher = _Watcher(mode, gpus > 0, layout, tell)

        def choose(own: Strategy | None) -> Strategy:
            given = resolve(layout)
            real = with_options_of(own, given) if given is not None else own or NOOPStrategy()
            real, watcher.offloads = _offloading(real, offload, gpus)
            return _WithoutValues(real, mode, recompute, watcher.take)

        try:
            overrides = Overrides(choose, precision, accumulation, compile=False, planned_ranks=planned_ranks, observes=True)
            with stand_ins(mode, gpus=gpus, device=device, memory=budget):
                target.run_until_enough(overrides, watcher.look_at)
        finally:
            watcher.close()
        model = _found(watcher.model, watcher.updates, target)
        return Planned(
            model,
            ranks,
            watcher.result(),
            mode.read,
            watcher.samples,
            watcher.tokens,
            watcher.micro_batches,
            watcher.is_compiled,
            watcher.pipeline,
            watcher.counted,
        )


def _found(model: Model | None, updates: int, target: Target) -> Model:
    """The model that was found.

    Raises:
        PlanError: there is no model, or it trains for fewer than two updates.
    """
    if model is None:
        raise PlanError(
            f"{target.script} gave echelon no module to train, so there is nothing to plan. It must reach echelon's train, "
            "fit or prepare."
        )
    if updates < 2:
        raise PlanError(
            f"{target.script} must train for 2 updates or more to be planned, got {updates}: the first one makes the "
            "optimizer's state. Give it more updates or a smaller global batch."
        )
    return model


def _offloading(layout: Strategy, asked: bool, gpus: int) -> tuple[Strategy, bool]:
    """The layout, with offloading if asked for; and whether some of the state is then outside of the device."""
    if asked and isinstance(layout, FSDPStrategy):
        layout = layout.but(cpu_offload=True)
    shards = layout if isinstance(layout, FSDPStrategy) else getattr(layout, "fsdp", None)
    return layout, gpus > 0 and shards is not None and offload_policy(shards.cpu_offload) is not None


class _Watcher(Callback):
    """Traces from the beginning of each step to its end. The loader works between steps, with real tensors.

    Attributes:
        model: the trained model, once it is known.
    """

    def __init__(self, mode: NoMemory, on_gpu: bool, layout: str | None, tell: Callable[[Model], None]) -> None:
        self.trace, self.updates = Trace(on_gpu), 0
        self.offloads = False
        self.model: Model | None = None
        self._layout, self._tell = layout, tell
        self._by_hand_steps = False  # a user's own `train_step` may step its optimizer only in some steps
        self.is_compiled = False
        self.pipeline: tuple[int, ...] = ()
        self._begin_update()
        self._mode, self._modes = mode, (mode, self.trace)
        self._step = contextlib.ExitStack()

    def _begin_update(self) -> None:
        self.samples = self.tokens = self.micro_batches = self.counted = 0
        self._repeats, self._times = False, 0
        self._marks: list[Traced] = []  # copies of the trace before each of the first three micro-batches
        self._shapes: list[list[torch.Size]] = []
        self._made: Any = None  # loss and outputs of the latest forward pass

    def look_at(self, unit: Any, dataloader: Iterable[Any], callbacks: list[Callback]) -> list[Callback]:
        return [self]

    def take(self, model: Model) -> None:
        """Note the model; several that train together become one."""
        self.model = model if self.model is None else self.model.beside(model)
        self._tell(self.model)

    def on_train_start(self, state: State, unit: Any) -> None:
        self._seen = unit.train_progress.num_updates_completed  # a loop that counts its epochs itself starts a run with each
        parts = list(unit.prepared_modules().values())
        if self.model is None and parts:
            self._take_by_hand(parts)
        kept = [tensor for each in unit.tracked_modules().values() for tensor in (*each.parameters(), *each.buffers())]
        is_optimized = isinstance(unit, OptimizedUnit)
        if is_optimized and unit.swa_model is not None:
            kept += unit.swa_model.state_dict().values()
        optimizers = unit.optimizers if is_optimized else unit.tracked_optimizers().values()
        self.trace.watch(nn.Module(), optimizers, kept, offloads=self.offloads)
        for each in [unit.prepared] if is_optimized else parts:
            self.trace.watch(each.unwrapped, (), (), buckets_of(each.module), offloads=self.offloads)
        self._mode.on_host = self.trace.on_host
        if is_optimized:
            self._watch_update(unit)
        else:
            self._watch_steps(unit)

    def _take_by_hand(self, parts: Sequence[Prepared[Any]]) -> None:
        """Note modules that echelon's layouts have not prepared. They keep their own layout."""
        layout = ", ".join(dict.fromkeys(each.describe()["layout"] or "none" for each in parts))
        if self._layout is not None:
            raise PlanError(
                f"a script must leave it to echelon to make modules parallel, to be given a layout, got {layout} by hand."
            )
        self.take(Model.of(layout, [each.unwrapped for each in parts], by_hand=True))
        for each in parts:
            without_values(each.module, self._mode)

    def _watch_steps(self, unit: Any) -> None:
        """Count the batches of a user's own `train_step`. An update then ends with a step of an optimizer."""
        step, size = unit.train_step, (unit.data_rank_and_size or (0, 1))[1]
        self._by_hand_steps = bool(unit.tracked_optimizers())

        def count(data: Any) -> Any:
            self._count(data, None, 1, size)
            return data

        @functools.wraps(step)  # its signature may take an iterator
        def counted(state: State, data: Any) -> Any:
            return step(state, map(count, data) if isinstance(data, Iterator) else count(data))

        unit.train_step = counted

    def _watch_update(self, unit: Any) -> None:
        self.is_compiled = unit._options.compile is not None
        update, passes, run_window = unit._update, unit._update.passes, unit._update.run_window
        forward, backward = update.forward, update.backward
        repeats = isinstance(unit, AutoUnit) and unit.several is None  # a user's own loop runs all passes itself
        if unit.prepared.trains == "scheduled":
            self.pipeline = ranks_of(unit.prepared.place.stages[0])
            unit.prepared.data.is_replica = False  # this rank is the only one, so it must count its samples
            self.trace.leaves_out = lambda: unit.prepared.batches.dry_run

        def seen(unit: Any, state: State, micro_batch: MicroBatch[Any]) -> Any:
            self._count_of(unit, micro_batch.data)
            self.counted += 1
            self._repeats = repeats and self._is_as_the_second(micro_batch)
            return passes(unit, state, micro_batch)

        def forward_once(unit: Any, state: State, micro_batch: MicroBatch[Any]) -> Any:
            if self._repeats:
                return self._made
            loss, outputs = forward(unit, state, micro_batch)
            self._made = loss.detach(), outputs
            return loss, outputs

        def backward_once(unit: Any, state: State, loss: Any, micro_batch: MicroBatch[Any], **options: Any) -> None:
            if self._repeats:
                unit.window.add(loss, micro_batch.weight)
            else:
                backward(unit, state, loss, micro_batch, **options)

        def window(unit: Any, state: State, micro_batches: Sequence[MicroBatch[Any]], *args: Any, **options: Any) -> Any:
            """Trace until the pipeline is full: then it repeats. Not with gpipe, which starts backward passes after all forward
            passes.
            """
            for each in micro_batches:
                self._count_of(unit, each.data)
            pipeline = unit.prepared.pipeline
            few = pipeline.cut.count + (len(self.pipeline) if self.updates else 0)  # the first makes the optimizer's state
            if pipeline.kind.name == "gpipe":
                few = len(micro_batches)
            made = list(run_window(unit, state, micro_batches[:few], *args, **options))
            self.counted = len(made)
            return iter(made + [made[-1]] * (len(micro_batches) - len(made)))

        update.passes, update.run_window = seen, window
        update.forward, update.backward = forward_once, backward_once

    def _is_as_the_second(self, micro_batch: MicroBatch[Any]) -> bool:
        """Whether to repeat the second micro-batch's trace instead of running this one. Between the second and the last
        micro-batch of an update, those with equal shapes hold, send and compute the same. In the first update already the second
        equals the first: without the optimizer's state it is never at the peak.
        """
        few = 3 if self.updates else 2
        shapes = [tensor.shape for tensor in tensors_in(micro_batch.data)]
        if self.counted <= 3:
            self._marks.append(self.trace.so_far())
            self._shapes.append(shapes)
        repeats = self.counted >= few and not micro_batch.is_last and bool(shapes) and shapes == self._shapes[few - 2]
        self._times += repeats
        return repeats

    def result(self) -> Traced:
        """The trace of the latest update, with repeated micro-batches."""
        traced = self.trace.result()
        if self._times:
            traced.repeat(self._marks[1], self._marks[2], self._times)
        return traced

    def _count_of(self, unit: Any, data: Any) -> None:
        self._count(data, unit.samples_given, unit.prepared.place.part[1], unit.prepared.data.size)

    def _count(self, data: Any, samples: int | None, parts: int, size: int) -> None:
        """Count a micro-batch for all ranks: data-parallel ranks have as many samples; ranks of one sequence have parts of it."""
        tokens = tokens_of(data)
        self.micro_batches += 1
        self.samples += samples_of(data, samples)[0] * size
        self.tokens += (tokens.numel() if tokens is not None else 0) * parts * size

    def on_train_step_start(self, state: State, unit: Any) -> None:
        for mode in self._modes:
            self._step.enter_context(mode)

    def on_train_step_end(self, state: State, unit: Any) -> None:
        self._step.close()
        before, self._seen = self._seen, unit.train_progress.num_updates_completed
        if self._seen > before and (self.trace.has_stepped or not self._by_hand_steps):
            self.updates += 1
            if self.updates >= 2:
                raise Enough
            self.trace.next_update()
            self._mode.read = 0
            self._begin_update()

    def close(self) -> None:
        self._step.close()
        self.trace.close()
