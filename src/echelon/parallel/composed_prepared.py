"""What a module that is parallel in several directions does in a step: each direction's part is asked for its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from echelon.common.errors import LayoutError, RanksDisagreeError
from echelon.parallel.context.context import ContextParallel
from echelon.parallel.context.probe import tensors_of
from echelon.parallel.pipeline import ShardedStages, StagesPrepared
from echelon.parallel.pipeline.prepared import Pipelined
from echelon.parallel.prepared import NO_CONTEXT
from echelon.world import agree
from echelon.world.mesh import ParallelDims

__all__ = ["ComposedPrepared", "ComposedStages"]

B = TypeVar("B")
R = TypeVar("R")


class _LaidOut(Pipelined):
    """Knows its place on the axes.

    Attributes:
        dims: the axes.
        rank: this rank.
    """

    dims: ParallelDims
    rank: int
    _compared = False  # what ranks that have the same samples were given

    def lay_out(self, dims: ParallelDims, rank: int) -> None:
        """Say where this rank is."""
        place = dims.place(rank)
        self.dims, self.rank = dims, rank
        self.part, self.stage = (place["cp"], dims.cp), (place["pp"], dims.pp)
        self.draws_apart = dims.cp > 1 or dims.pp > 1
        if self.pipeline is not None:
            self.pipeline.cut.draws.samples = dims.dp_rank(rank) * dims.cp + place["cp"]

    def part_of(self, batch: Any) -> Any:
        if not self._compared and self.dims.tp * self.dims.cp * self.dims.pp > 1:
            self._compared = True
            self._compare(batch)
        return batch

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


class ComposedPrepared(_LaidOut, ShardedStages):
    """A module that is parallel in several directions.

    Attributes:
        context: what splits sequences; None without context parallelism.
    """

    context: ContextParallel | None = None

    def part_of(self, batch: Any) -> Any:
        super().part_of(batch)
        if self.context is None:
            return batch
        part = self.context.part_of(batch)
        self.share = self.context.share
        return part

    @property
    def doubts_parts(self) -> bool:  # type: ignore[override]
        return self.context is not None and self.context.doubts_parts

    @property
    def is_trying(self) -> bool:  # type: ignore[override]
        return super().is_trying or (self.context is not None and self.context.is_trying)

    def check_parts(
        self, batch: Any, weigh: Callable[[Any], Any], compute: Callable[[Any], Any], dtype: torch.dtype | None
    ) -> None:
        if self.context is None:
            return

        def weight_of(data: Any, share: float | torch.Tensor) -> float:
            self.share = share
            return float(weigh(data))

        types = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        self.context.check_parts(batch, weight_of, compute, [*types, *(t for t in (dtype, self.computes_in) if t is not None)])

    def check_loss(self, loss: torch.Tensor) -> None:
        if self.context is not None:
            self.context.check_loss(loss)

    def whole_of(self, outputs: Any) -> Any:
        return outputs if self.context is None else self.context.whole_of(outputs)

    def forward(self, batch: B, forward: Callable[[B], R]) -> R:
        if self.context is None:
            return super().forward(batch, forward)
        with self.context.active():
            return super().forward(batch, forward)

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        around = super().accumulate(last)
        if self.context is None:
            return around
        return self.context.active() if around is NO_CONTEXT else _both(around, self.context.active())

    def fix_order(self) -> None:
        if self.context is not None:
            raise LayoutError("bit-equal training needs whole sequences, got cp > 1. Use dp_shard in its place.")
        super().fix_order()

    def forward_backward_window(self, *window: Any) -> list[tuple[torch.Tensor, Any]]:
        with NO_CONTEXT if self.context is None else self.context.active():
            return super().forward_backward_window(*window)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class ComposedStages(_LaidOut, StagesPrepared):
    """A pipeline alone."""
