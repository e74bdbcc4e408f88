"""The layout of ranks along named axes, as one value: `Layout(dp_shard=2, tp=4)`.

Each kind of parallelism has files of its own, which change a module and do their part of a step. This file combines them in the
only right order: cut out stages, split their layers, distribute their experts, let their attention see all ranks, and shard the
rest. `ParallelPrepared` asks each of them for its part of a step.
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
from echelon.parallel.experts.distribute import check_experts, distribute_experts
from echelon.parallel.fsdp.fsdp import FSDPPrepared, FSDPStrategy
from echelon.parallel.fsdp.move_and_sync import equalize
from echelon.parallel.gradients import clip
from echelon.parallel.guards.guard import SameDraws
from echelon.parallel.meta.materialize import materialize, remember
from echelon.parallel.patching import for_now
from echelon.parallel.pipeline.pipeline import Pipeline
from echelon.parallel.pipeline.plan import Stages, cut_into_stages, plan_stages, refuse_recomputed
from echelon.parallel.pipeline.schedules import kind_named
from echelon.parallel.pipeline.stages import Splits, check_splits
from echelon.parallel.prepared import NO_CONTEXT, Form, MicroBatch, Place, Prepared, combined
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.strategy import Strategy
from echelon.parallel.tensor.tensor import Chosen, check_tensor, split_layers
from echelon.world import agree
from echelon.world.init import World, check_joined, ensure_group
from echelon.world.mesh import AXES, ParallelDims

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["Layout", "ParallelPrepared"]

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741
R = TypeVar("R")
logger = logging.getLogger(__name__)


# A step of a module that is parallel along several axes.

Made = tuple[torch.Tensor, Any]


class ParallelPrepared(FSDPPrepared):
    """A module of a `Layout`: split along the layout's axes, and sharded unless `pp` is its only axis.

    Attributes:
        dims, rank: the axes, and this rank.
        context: splits sequences; None without context parallelism.
        pipeline: runs the stages; None if all ranks have all layers.
    """

    dims: ParallelDims
    rank: int
    context: ContextParallel | None = None
    pipeline: Pipeline | None = None

    def lay_out(self, dims: ParallelDims, rank: int, context: ContextParallel | None, pipeline: Pipeline | None) -> None:
        """Set this rank's place and how the module was split. Once, when the module has its final form. Collective."""
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
        """Context around passes."""
        return NO_CONTEXT if self.context is None else self.context.active()

    def _compare(self, batch: Any) -> None:
        """Check that ranks which differ only in tp, cp or pp have samples of the same sizes. Otherwise gloo would end the
        process, or stages would wait forever. Collective.

        Raises:
            RanksDisagreeError: on all ranks.
        """
        every = agree.gather([list(t.shape) for t in tensors_of(batch)])
        for rank, shapes in enumerate(every):
            first = next(r for r in range(rank + 1) if self.dims.dp_rank(r) == self.dims.dp_rank(rank))
            if shapes != every[first]:
                raise RanksDisagreeError(
                    "ranks that differ only in tp, cp or pp must have the same samples, got tensors of shapes "
                    f"{every[first]} on rank {first} and {shapes} on rank {rank}. echelon.Loader gives them the same samples; "
                    "divide data of your own over the ranks of the other axes only."
                )

    # --- training

    def optimizer(self, make: Callable[[nn.Module], O]) -> O:
        if self.pipeline is None:
            return super().optimizer(make)
        made, problem = None, None
        try:
            made = super().optimizer(make)
        except ValueError as error:  # torch's, for an optimizer without parameters; the other stages must not wait
            problem = f"{error}"
        if (why := next((each for each in agree.gather(problem) if each is not None), None)) is not None:
            raise PipelineError(
                f"the optimizer of a stage cannot be made: {why}. In a pipeline each rank has only its own stages' parameters, "
                "and perhaps none of them is trained: pass all module.parameters(), also frozen ones, which it leaves alone."
            )
        assert made is not None
        return made

    def add_extra_params(self, others: list[nn.Parameter]) -> None:
        super().add_extra_params(others)
        if self.pipeline is not None:
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
            """Called before each backward pass of the schedule: whether it is its stage's `last`; `number` were before it."""
            if several and self.requires_gradient_sync:
                return  # passes of different stages reach different parameters, so no all-reduce can be deferred
            if self._same is not None and number:
                self._same.end_backward(last=False)
            super(ParallelPrepared, self).accumulate(last)

        with self._over_parts():
            begins = before if self.data.axes else None
            with for_now(self.passes, trains=True):
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
            except UsageError as error:  # perhaps only on some stages
                failure = error
            agree.fail_together(failure, "a stage")
        return made

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        if self.pipeline is None:
            return super().clip_grad_norm_(max_norm, norm_type)
        elsewhere = self.pipeline.shared.elsewhere
        return clip.clip_by_norm_(self.module.parameters(), max_norm, norm_type, beside=self.place.stages, elsewhere=elsewhere)


@dataclass(frozen=True, repr=False)
class Layout(Strategy):
    """How ranks share a model and its samples, along named axes whose sizes multiply to the number of ranks.

    `layout="dp_shard=2,tp=4"` is `Layout(dp_shard=2, tp=4)`. Some words are short for a layout: "ddp" for `dp_replicate=-1`,
    "fsdp" for `dp_shard=-1`.

    Args:
        dp_replicate: replicas of the model, each on different samples.
        dp_shard: ranks that shard parameters, gradients and optimizer state, each on different samples. By default the number
            of ranks that the other axes leave. -1 means the same for any one axis.
        cp: context parallelism: ranks that split each sequence.
        tp: tensor parallelism: ranks that split single layers.
        pp: pipeline parallelism: ranks that hold different layers.
        ep: expert parallelism: ranks over which a layer's experts are divided. Not a further axis: these are neighbouring ranks
            of dp_shard x cp, and ep must divide that product.
        plan: how layers are split over `tp`: a dict from submodule names, with `*` for any part of a name between dots, to a
            style. "colwise" splits a layer's outputs; the following code works on this rank's part of the features. "rowwise"
            splits the inputs, after a colwise layer, and sums the results. "colwise_gather" splits the outputs and gathers them.
            "rowwise_split" splits inputs that are whole on all ranks. "summed" marks a whole layer that works on split features,
            such as a norm of each head. A ParallelStyle of torch splits its layer in torch's way. "rowwise" splits an
            nn.Embedding by rows. The names that transformers uses for these are understood. By default the module's own
            `tp_plan`, that of transformers, or an inferred plan, which rank 0 logs and `echelon.layouts.tp_plan(module)` returns.
        sequence_parallel: between layers split over `tp`, compute norms, dropout and residual sums on this rank's part of the
            sequence. For models with one list of blocks that are called in order, first to last, and whose attention and MLP are
            submodules of the block; sequences of any length. Hooks between blocks, and hidden states that the model returns, see
            parts.
        stages: where the module is cut for `pp`: the names of the modules at which further stages begin, such as ["blocks.4"], or
            a list of names for each stage. By default the repeated blocks are balanced by their parameters.
        schedule: the order of forward and backward passes over `pp`: "gpipe", "1f1b", "interleaved" (two stages a rank, or as
            `stages` says), "zero_bubble", "zbv".
        sequence_dim: the dimension of a batch's tensors that `cp` splits, if it is not 1: one number for all tensors, or a dict
            from keys, fields or tuple indices to dimensions, with None for tensors that stay whole.
        check_context: in the first pass with `cp`, compare the module's outputs for parts of sequences with those for whole
            sequences, submodule by submodule. Not with `pp`, whose stages see no whole sequence.
        fsdp: how the data-parallel ranks share the parameters: blocks, mixed precision, offload.

    A plan of your own depends on the model's code: with "colwise", attention must use `view(b, t, -1, head_size)`, with -1 for
    the heads, and a fused projection must have the heads as its outermost dimension. "colwise_gather" and "rowwise_split" are
    right for any code.
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
        """Parse "dp_shard=2,tp=4", or "dp_shard=2+tp=4" for command lines on which commas separate layouts.

        Raises:
            UsageError: a word that is not an axis's name, an axis given twice, or a size that is not a whole number.
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
        """The axes in the form that `parse` reads, without other options."""
        sizes = {axis: getattr(self, axis) for axis in (*AXES, "ep")}
        default = {field.name: field.default for field in fields(self)}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size != default[axis]) or "dp_shard=-1"

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.text

    def dims(self, world_size: int) -> ParallelDims:
        """The sizes of all axes on `world_size` ranks.

        Raises:
            UsageError: they do not multiply to the world size.
        """
        return ParallelDims.of(world_size, **{name: getattr(self, name) for name in (*AXES, "ep")})

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        check_joined()
        dims = self.dims(world.size)
        if self.dp_replicate != 1 and not set(dims.used) - {"dp_replicate"} and self.fsdp is None:
            return DDPStrategy().prepare(module, world, recipe)
        # Phase 1: all checks, before the first collective.
        plan, chosen = self.check(module, dims, recipe)
        if chosen is not None:
            chosen.report(world)
        # Phase 2: equal values on all ranks; then each rank takes its part of the layers.
        fsdp, device = self.fsdp or FSDPStrategy(), world.device
        ensure_group(device)
        remember(module)
        equalize((*module.parameters(), *module.buffers()), device, [None] if fsdp.sync_module_states and world.size > 1 else [])
        pipeline = None if plan is None else cut_into_stages(module, plan, dims.pp_mesh(device).get_group(), device)
        if self._is_alone(dims):
            module = recipe.applied(module)
            alone = ParallelPrepared(materialize(module, device), world, [])
            alone.lay_out(dims, world.rank, None, pipeline)
            return alone
        if chosen is not None:
            split_layers(module, chosen.of_stages(module), dims.tp_mesh(device))
        if dims.ep > 1:  # before cp replaces each module's forward
            distribute_experts(module, dims.ep_mesh(device), dims.ep_data_mesh(device))
        context = self._context(module, dims, world)
        # Phase 3: the axes over which gradients are averaged.
        data_axes(module, dims.samples_mesh(device))
        sharded = fsdp.but(sync_module_states=False, device_mesh=dims.data_mesh(device))
        prepared = sharded.shard(module, world, recipe, ParallelPrepared)
        prepared.lay_out(dims, world.rank, context, pipeline)
        if self.sequence_parallel and dims.tp > 1:
            prepared.place = replace(prepared.place, rng_differs=True)
        if pipeline is None and dims.cp == 1 and dims.tp > 1:  # pp and cp have random streams of their own
            prepared.draws = SameDraws(dims.tp_rank(world.rank), dims.tp, world.device)
            prepared.guards.append(prepared.draws)
        return prepared

    def check(self, module: nn.Module, dims: ParallelDims, recipe: Recipe) -> tuple[Stages | None, Chosen | None]:
        """Check everything that can be wrong. Not collective.

        Returns:
            how the module would be cut into stages, and how its layers would be split over `tp`.
        Raises:
            UsageError: an axis cannot divide this module.
        """
        given = ("device_mesh", "process_group")
        if any(getattr(self.fsdp, name, None) is not None for name in given):
            raise LayoutError(
                "fsdp must have no device_mesh and no process_group in a Layout, whose axes choose the ranks. Leave them out."
            )
        check_experts(module, dims.ep, dims.pp)
        if dims.cp > 1:
            check_context(module, recipe)
        stages, chosen = self._stages(module, dims), None
        if stages is not None:
            refuse_recomputed(module, stages, recipe.activation_checkpoint)
        if dims.tp > 1:
            chosen = check_tensor(module, self.plan, dims.tp, sequence_parallel=self.sequence_parallel)
        return stages, chosen

    def _context(self, module: nn.Module, dims: ParallelDims, world: World) -> ContextParallel | None:
        if dims.cp == 1:
            return None
        checks = self.check_context and dims.pp == 1  # a stage never sees a whole sequence
        if self.check_context and not checks and world.rank == 0:
            logger.warning(
                "context parallelism within a pipeline: parts of sequences are not compared with whole sequences. Run the script "
                "once with pp=1, or run `echelon prove` on it"
            )
        return ContextParallel(module, dims.cp_mesh(world.device), world.device, self.sequence_dim, check=checks)

    def _is_alone(self, dims: ParallelDims) -> bool:
        """Whether `pp` is the only axis, so each rank has its stages' parameters whole."""
        return set(dims.used) == {"pp"} and self.fsdp is None

    def _stages(self, module: nn.Module, dims: ParallelDims) -> Stages | None:
        if dims.pp == 1:
            return None
        plan = plan_stages(module, self.stages, self.schedule, dims.pp)
        if plan.kind.splits_backward and not self._is_alone(dims):
            raise LayoutError(
                f"schedule={self.schedule!r} must have pp as the only axis and no fsdp option, got {dims.used}: it computes "
                "gradients of weights and of inputs in separate passes, which fully_shard cannot follow. Use '1f1b' or "
                "'interleaved'."
            )
        return plan
