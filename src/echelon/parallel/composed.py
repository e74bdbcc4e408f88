"""The layout of ranks along named axes, as one value: `Layout(dp_shard=2, tp=4)`.

Each direction is a file of its own, which knows how to change a module and what that means for a step. Here they are put
together, in the one order that is right: stages are cut out, their layers split, their experts divided, their attention taught
to look over ranks, and what is left is sharded. `ParallelPrepared` asks each direction for its share of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from echelon.common.arguments import flags
from echelon.common.errors import LayoutError, PipelineError, RanksDisagreeError, UsageError, require
from echelon.common.numbers import whole
from echelon.parallel.axes import data_axes
from echelon.parallel.context.batch import SequenceDim, check_sequence_dim
from echelon.parallel.context.context import ContextParallel, check_context
from echelon.parallel.context.probe import tensors_of
from echelon.parallel.ddp.ddp import DDPStrategy
from echelon.parallel.experts import check_experts, distribute_experts
from echelon.parallel.fsdp.fsdp import FSDPPrepared, FSDPStrategy
from echelon.parallel.gradients import clip
from echelon.parallel.guards.guard import SameDraws
from echelon.parallel.meta.materialize import materialize, remember
from echelon.parallel.pipeline import Pipeline, Stages, cut_into_stages, plan_stages
from echelon.parallel.pipeline.schedules import kind_named
from echelon.parallel.pipeline.stages import Splits, check_splits
from echelon.parallel.prepared import NO_CONTEXT, Form, MicroBatch, Place, Prepared, combined
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.strategy import Strategy
from echelon.parallel.tensor.tensor import Chosen, check_tensor, equalize, split_layers
from echelon.world import agree
from echelon.world.init import World, check_joined, ensure_group, rank_info
from echelon.world.mesh import AXES, ParallelDims

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["Layout", "ParallelPrepared"]

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741
R = TypeVar("R")
logger = logging.getLogger(__name__)


# What a module that is parallel along several axes does in a step: each direction is asked for its share, in one order.

Made = tuple[torch.Tensor, Any]


class ParallelPrepared(FSDPPrepared):
    """A module of a `Layout`: sharded, unless stages are all there is, and cut in the directions that the layout has.

    Attributes:
        dims, rank: the axes, and this rank.
        context: what splits sequences; None without context parallelism.
        pipeline: what runs the stages; None where all ranks have all layers.
    """

    dims: ParallelDims
    rank: int
    context: ContextParallel | None = None
    pipeline: Pipeline | None = None

    def lay_out(self, dims: ParallelDims, rank: int, context: ContextParallel | None, pipeline: Pipeline | None) -> None:
        """Say where this rank is, and what the module was cut by. Once, when the module has its final form. Collective."""
        place = dims.place(rank)
        self.dims, self.rank, self.context = dims, rank, context
        apart = [] if pipeline is None else [pipeline.group]
        self.place = Place((place["cp"], dims.cp), (place["pp"], dims.pp), apart, rng_differs=dims.cp > 1 or dims.pp > 1)
        self.form = self.form if self.data.axes else Form("own")
        if context is not None:
            context.gathered_in = self.form.gathered_in
            self.batches = context
        if dims.tp * dims.cp * dims.pp > 1:
            self.batches.look = self._compare
        if pipeline is None:
            if context is not None:
                context.look_at_outputs(self.module)
            self.data.is_replica = not dims.speaks(rank)
            return
        self.data.is_replica = not pipeline.has_last or dims.tp_rank(rank) > 0  # the last stage need not be on the last rank
        self.pipeline, self.trains, pipeline.batches = pipeline, "scheduled", self.batches
        pipeline.cut.draws.samples = dims.dp_rank(rank) * dims.cp + place["cp"]
        pipeline.shared.bind(self.named_parameters())
        pipeline.shared.equalize()

    def describe(self) -> dict[str, Any]:
        return {
            "module": type(self.unwrapped).__name__,
            "layout": ",".join(f"{axis}={size}" for axis, size in self.dims.used.items()) or None,
            "mesh": self.dims.used,
        }

    def forward(self, batch: B, forward: Callable[[B], R]) -> R:
        with self._over_parts():
            if self.pipeline is None:
                return super().forward(batch, forward)
            made: R = self.pipeline.evaluate(batch, forward)
            return made

    def _over_parts(self) -> AbstractContextManager[Any]:
        """Around passes."""
        return NO_CONTEXT if self.context is None else self.context.active()

    def _compare(self, batch: Any) -> None:
        """Ranks that differ in tp, cp or pp must have the same samples: of other sizes, gloo would end the process, or stages
        wait for ever. Collective.

        Raises:
            RanksDisagreeError: on all ranks.
        """
        every = agree.gather([list(t.shape) for t in tensors_of(batch)])
        for rank, shapes in enumerate(every):
            first = next(r for r in range(rank + 1) if self.dims.dp_rank(r) == self.dims.dp_rank(rank))
            if shapes != every[first]:
                raise RanksDisagreeError(
                    "ranks that differ in tp, cp or pp alone must be given the same samples, got tensors of "
                    f"{every[first]} on rank {first} and of {shapes} on rank {rank}. echelon.Loader gives them the same; divide "
                    "data of your own over the ranks of the other axes alone."
                )

    # --- training

    def optimizer(self, make: Callable[[nn.Module], O]) -> O:
        if self.pipeline is None:
            return super().optimizer(make)
        made, problem = None, None
        try:
            made = super().optimizer(make)
        except ValueError as error:  # torch's, of an optimizer without parameters; the other stages must not wait
            problem = f"{error}"
        if (why := next((each for each in agree.gather(problem) if each is not None), None)) is not None:
            raise PipelineError(
                f"the optimizer of a stage cannot be made: {why}. In a pipeline each rank has the parameters of its own stages, "
                "of which none may be trained: give it module.parameters() with the frozen ones, which it leaves alone."
            )
        assert made is not None
        return made

    def add_extra_params(self, others: list[nn.Parameter]) -> None:
        super().add_extra_params(others)
        if self.pipeline is None:
            return
        if others:
            raise PipelineError(
                f"the optimizer must hold the module's parameters only in a pipeline, got {len(others)} others, which only the "
                "last stage would train. Make them part of the module."
            )
        self.pipeline.shared.equalize()

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        return combined(super().accumulate(last), self._over_parts())

    def forward_backward_window(
        self,
        micro_batches: Sequence[MicroBatch[Any]],
        forward: Callable[[MicroBatch[Any]], Made],
        backward: Callable[[torch.Tensor, MicroBatch[Any]], None],
        *,
        outputs: bool = True,
    ) -> list[Made]:
        pipeline = self.pipeline
        if pipeline is None:
            return super().forward_backward_window(micro_batches, forward, backward, outputs=outputs)
        several = len(pipeline.cut.own) > 1
        defers = self.requires_gradient_sync and not self.requires_all_reduce and len(self.data.axes) > 1
        if defers and not several and self._same is None:
            self._compare_gradients(together=False)

        def before(last: bool, number: int) -> None:
            """Each backward pass that the schedule calls: `last` of its stage, after `number` others."""
            if several and self.requires_gradient_sync:
                return  # passes of several stages do not reach the same parameters, so no all-reduce can wait
            if self._same is not None and number:
                self._same.end_backward(last=False)
            super(ParallelPrepared, self).accumulate(last)

        with self._over_parts():
            begins = before if self.data.axes else None
            made = pipeline.window(micro_batches, forward, backward, begins, share=outputs)
            if self._same is not None:
                self._same.end_backward(last=True)
            self._reduces = True
            if self._loose or self._frozen:
                self._average_loose()
        if self.data.axes and not self._is_checked:
            failure: UsageError | None = None
            try:
                self._check_first(made[0][0])
            except UsageError as error:  # perhaps of some stages alone
                failure = error
            agree.fail_together(failure, "a stage")
        return made

    def fix_order(self) -> None:
        if self.context is not None:
            raise LayoutError("bit-equal training needs whole sequences, got cp > 1. Use dp_shard in its place.")
        if self.pipeline is not None:
            raise PipelineError("bit-equal training has no pipeline. Use pp=1.")
        super().fix_order()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        if self.pipeline is None:
            return super().clip_grad_norm_(max_norm, norm_type)
        elsewhere = self.pipeline.shared.elsewhere
        return clip.clip_by_norm_(self.module.parameters(), max_norm, norm_type, beside=self.place.stages, elsewhere=elsewhere)


@dataclass(frozen=True, repr=False)
class Layout(Strategy):
    """How ranks share a model and its samples, along named axes whose sizes multiply to the number of ranks.

    `layout="dp_shard=2,tp=4"` is `Layout(dp_shard=2, tp=4)`. Some words are short for one: "ddp" for `dp_replicate=-1`, "fsdp"
    for `dp_shard=-1`.

    Args:
        dp_replicate: copies of the model, each on other samples.
        dp_shard: ranks that split parameters, gradients and optimizer state, each on other samples. By default what the other
            axes leave. -1 says so for any one axis.
        cp: context parallelism: ranks that split each sequence.
        tp: tensor parallelism: ranks that split single layers.
        pp: pipeline parallelism: ranks that hold other layers.
        ep: expert parallelism: ranks among which a layer's experts are divided. It is no further axis: they are neighbours of
            dp_shard x cp, and ep divides their number.
        plan: how layers are split over `tp`: submodule names, `*` for any part of a name between dots, to "colwise" (a layer's
            outputs; what follows works on this rank's part of the features), "rowwise" (its inputs, after a colwise layer; the
            results are summed up), "colwise_gather" (its outputs, put together again), "rowwise_split" (its inputs, of which all
            ranks have all), "summed" (a whole layer that works on split features, such as a norm of each head), or a
            ParallelStyle of torch, which splits its layer in torch's way. An nn.Embedding is split by rows with
            "rowwise". Names of transformers for the same are understood. By default the module's own `tp_plan`, that of
            transformers, or an inferred one, which rank 0 logs and `echelon.layouts.tp_plan(module)` gives.
        sequence_parallel: between layers split over `tp`, work on this rank's part of the sequence: norms, dropout, sums of
            residuals. For models with one list of blocks, whose first is called first and last last, and whose attention and MLP
            are submodules of the block; sequences of any length. What hooks see between blocks, and hidden states that a model
            gives out, are parts.
        stages: where the module is cut for `pp`: the names of the modules at which further stages begin, such as ["blocks.4"], or
            a list of names for each stage. By default the repeated blocks, balanced by their parameters.
        schedule: the order of forward and backward passes over `pp`: "gpipe", "1f1b", "interleaved" (two stages a rank, or as
            `stages` says), "zero_bubble", "zbv".
        sequence_dim: where the tensors of a batch have the sequence that `cp` splits, if that is not dimension 1: a number for
            all of them, or a dict from keys, fields or numbers in a tuple to dimensions, None for tensors that stay whole.
        check_context: compare, in the first pass with `cp`, what the module gives for parts of sequences with what it gives for
            whole ones, submodule by submodule. Not with `pp`, whose stages see no whole sequence.
        fsdp: how the data-parallel ranks share the parameters: blocks, mixed precision, offload.

    A plan of one's own must know the code: with "colwise", attention says `view(b, t, -1, head_size)`, with -1 for its heads, and
    a fused projection has the heads as its outermost dimension. "colwise_gather" and "rowwise_split" are right for any code.
    """

    dp_replicate: int = 1
    dp_shard: int | None = None
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    plan: Mapping[str, str | ParallelStyle] | None = None
    sequence_parallel: bool = False
    stages: Splits | None = None
    schedule: str = "1f1b"
    sequence_dim: SequenceDim = None
    check_context: bool = True
    fsdp: FSDPStrategy | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*AXES, "ep"):
            if (size := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(name, size, at_least=1 if name == "ep" else -1, kind=LayoutError))
        object.__setattr__(self, "sequence_dim", check_sequence_dim(self.sequence_dim))
        flags(check_context=self.check_context, sequence_parallel=self.sequence_parallel, kind=LayoutError)
        require(isinstance(self.fsdp, FSDPStrategy | None), "fsdp", "FSDPStrategy(...) or None", self.fsdp, kind=LayoutError)
        is_plan = isinstance(self.plan, Mapping) and all(isinstance(name, str) for name in self.plan)
        require(
            self.plan is None or is_plan, "plan", "a dict from names of layers to styles, or None", self.plan, kind=LayoutError
        )
        object.__setattr__(self, "stages", check_splits(self.stages))
        kind_named(self.schedule)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """From "dp_shard=2,tp=4", or "dp_shard=2+tp=4" where commas part layouts, as a command line has it.

        Raises:
            UsageError: another word than an axis's name, an axis twice, or no whole number.
        """
        sizes: dict[str, Any] = {}
        for word in text.replace("+", ",").split(","):
            name, _, size = (part.strip() for part in word.partition("="))
            known = name in (*AXES, "ep") and name not in sizes
            if not known or not (size.isascii() and size.removeprefix("-").isdecimal()):
                raise LayoutError(
                    f"layout must give each axis once, with its size, such as 'dp_shard=2,tp=4', of {', '.join(AXES)}, ep, got "
                    f"{word.strip()!r} in {text!r}."
                )
            sizes[name] = int(size)
        return cls(**sizes)

    @property
    def text(self) -> str:
        """The axes, as `parse` reads them; other options are not in it."""
        sizes = {axis: getattr(self, axis) for axis in (*AXES, "ep")}
        default = {field.name: field.default for field in fields(self)}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size != default[axis]) or "dp_shard=-1"

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.text

    def dims(self, world_size: int) -> ParallelDims:
        """The sizes of all axes on so many ranks.

        Raises:
            UsageError: they do not multiply to the world size.
        """
        return ParallelDims.of(world_size, **{name: getattr(self, name) for name in (*AXES, "ep")})

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        check_joined()
        dims = self.dims(world.size)
        if self.dp_replicate != 1 and not set(dims.used) - {"dp_replicate"} and self.fsdp is None:
            return DDPStrategy().prepare(module, world, recipe)
        # Phase 1: everything that can be wrong, before the first collective.
        plan, chosen = self.check(module, dims, recipe)
        if chosen is not None:
            chosen.report(world)
        _near(dims, world)
        # Phase 2: the same values on all ranks, of which each takes its part of the layers.
        fsdp, device = self.fsdp or FSDPStrategy(), world.device
        ensure_group(device)
        remember(module)
        equalize(module, world, from_rank0=fsdp.sync_module_states)
        pipeline = None if plan is None else cut_into_stages(module, plan, dims.pp_mesh(device).get_group(), device)
        if self._is_alone(dims):
            module = recipe.applied(module)
            alone = ParallelPrepared(materialize(module, device), world, [])
            alone.lay_out(dims, world.rank, None, pipeline)
            return alone
        if chosen is not None:
            split_layers(module, chosen.of_stages(module), dims.tp_mesh(device))
        if dims.ep > 1:  # before cp has a forward of its own in each module
            distribute_experts(module, dims.ep_mesh(device), dims.ep_data_mesh(device))
        context = self._context(module, dims, world)
        # Phase 3: the axes over which gradients are averaged.
        data_axes(module, dims.samples_mesh(device))
        sharded = fsdp.but(sync_module_states=False, device_mesh=dims.data_mesh(device))
        prepared = sharded.shard(module, world, recipe, ParallelPrepared)
        prepared.lay_out(dims, world.rank, context, pipeline)
        if self.sequence_parallel and dims.tp > 1:
            prepared.place = replace(prepared.place, rng_differs=True)
        if pipeline is None and dims.cp == 1 and dims.tp > 1:  # stages and parts of sequences begin streams of their own
            prepared.draws = SameDraws(dims.tp_rank(world.rank), dims.tp, world.device)
            prepared.guards.append(prepared.draws)
        return prepared

    def check(self, module: nn.Module, dims: ParallelDims, recipe: Recipe) -> tuple[Stages | None, Chosen | None]:
        """Everything that can be wrong: how the module would be cut into stages, and its layers over `tp`. Not collective.

        Raises:
            UsageError: an axis cannot divide this module.
        """
        given = ("device_mesh", "process_group")
        if any(getattr(self.fsdp, name, None) is not None for name in given):
            raise LayoutError("fsdp must have no mesh and no group of its own in Layout: the axes choose the ranks.")
        check_experts(module, dims.ep, dims.pp)
        if dims.cp > 1:
            check_context(module, recipe)
        stages, chosen = self._stages(module, dims), None
        if dims.tp > 1:
            chosen = check_tensor(module, self.plan, dims.tp, sequence_parallel=self.sequence_parallel)
        return stages, chosen

    def _context(self, module: nn.Module, dims: ParallelDims, world: World) -> ContextParallel | None:
        if dims.cp == 1:
            return None
        checks = self.check_context and dims.pp == 1  # a stage never sees a whole sequence
        if self.check_context and not checks and world.rank == 0:
            logger.warning(
                "context parallelism within a pipeline: parts of sequences are not compared with whole ones. Run the script once "
                "with pp=1, or `echelon prove` it"
            )
        return ContextParallel(module, dims.cp_mesh(world.device), world.device, self.sequence_dim, check=checks)

    def _is_alone(self, dims: ParallelDims) -> bool:
        """Whether a pipeline is all there is: each rank has its stages' parameters whole."""
        return set(dims.used) == {"pp"} and self.fsdp is None

    def _stages(self, module: nn.Module, dims: ParallelDims) -> Stages | None:
        if dims.pp == 1:
            return None
        plan = plan_stages(module, self.stages, self.schedule, dims.pp)
        if plan.kind.splits_backward and not self._is_alone(dims):
            raise LayoutError(
                f"schedule={self.schedule!r} computes gradients of weights apart from those of inputs, which fully_shard cannot "
                f"follow: it needs pp alone, got {dims.used}. Use '1f1b' or 'interleaved'."
            )
        return plan


def _near(dims: ParallelDims, world: World) -> None:
    """Ranks that exchange activations within a layer should be on one machine."""
    local, near = rank_info().local_world_size, dims.tp * dims.cp
    if world.rank == 0 and 1 < local < world.size and local % near:
        logger.warning(
            "tp %d x cp %d = %d ranks exchange activations in every layer, but a machine has %d: some of them will do so over "
            "the network. Choose sizes whose product divides %d.",
            dims.tp,
            dims.cp,
            near,
            local,
            local,
        )
