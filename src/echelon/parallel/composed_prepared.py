"""What a module that is parallel along several axes does in a step: each direction is asked for its share, in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from echelon.common.errors import LayoutError, PipelineError, RanksDisagreeError, UsageError
from echelon.parallel.context.context import ContextParallel
from echelon.parallel.context.probe import tensors_of
from echelon.parallel.fsdp.sharding import FSDPPrepared
from echelon.parallel.gradients import clip
from echelon.parallel.micro_batch import MicroBatch
from echelon.parallel.pipeline import Pipeline
from echelon.parallel.prepared import NO_CONTEXT, Form, Place
from echelon.parallel.tensor.gradients import check_same_loss, check_whole_layers
from echelon.world import agree
from echelon.world.mesh import ParallelDims

__all__ = ["ParallelPrepared"]

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741
R = TypeVar("R")
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
        self.place = Place((place["cp"], dims.cp), (place["pp"], dims.pp), apart, draws_apart=dims.cp > 1 or dims.pp > 1)
        self.form = self.form if self._averaged else Form("own")
        if context is not None:
            context.gathered_in = self.form.gathered_in
            self.batches = context
        if dims.tp * dims.cp * dims.pp > 1:
            self.batches.look = self._compare
        if pipeline is None:
            if context is not None:
                context.look_at_outputs(self.module)
            return
        self.pipeline, self.trains, pipeline.batches = pipeline, "scheduled", self.batches
        pipeline.cut.draws.samples = dims.dp_rank(rank) * dims.cp + place["cp"]
        pipeline.shared.bind(self.named_parameters())
        pipeline.shared.equalize()

    def find_replicas(self) -> None:
        self.is_replica = not self.dims.speaks(self.rank)
        if self.pipeline is not None:  # the last stage need not be on the last rank
            self.is_replica = not self.pipeline.has_last or self.dims.tp_rank(self.rank) > 0

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
        told = agree.gather([list(t.shape) for t in tensors_of(batch)])
        for rank, shapes in enumerate(told):
            first = next(r for r in range(rank + 1) if self.dims.dp_rank(r) == self.dims.dp_rank(rank))
            if shapes != told[first]:
                raise RanksDisagreeError(
                    "ranks that differ in tp, cp or pp alone must be given the same samples, got tensors of "
                    f"{told[first]} on rank {first} and of {shapes} on rank {rank}. echelon.Loader gives them the same; divide "
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
        if (told := next((each for each in agree.gather(problem) if each is not None), None)) is not None:
            raise PipelineError(
                f"the optimizer of a stage cannot be made: {told}. In a pipeline each rank has the parameters of its own stages, "
                "of which none may be trained: give it module.parameters() with the frozen ones, which it leaves alone."
            )
        assert made is not None
        return made

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

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        around = super().accumulate(last)
        if self.context is None:
            return around
        return self.context.active() if around is NO_CONTEXT else _both(around, self.context.active())

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
        defers = self.requires_gradient_sync and not self.requires_all_reduce and len(self._averaged) > 1
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
            begins = before if self._averaged else None
            made = pipeline.window(micro_batches, forward, backward, begins, share=outputs)
            if self._same is not None:
                self._same.end_backward(last=True)
            self._reduces = True
            if self._loose or self._frozen:
                self._average_loose()
        if self._averaged and not self._is_checked:
            self._is_checked = True
            self._check_plan(made[0][0])
        return made

    def _check_plan(self, loss: torch.Tensor) -> None:
        """After the first update's backward passes, on all ranks: only those of some stages may see what is wrong."""
        found: UsageError | None = None
        try:
            check_same_loss(self.module, loss)
            check_whole_layers(self.module)
        except UsageError as error:
            found = error
        agree.fail_together(found, "a stage")

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


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
