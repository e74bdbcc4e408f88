"""Stages whose parameters are split over the data-parallel ranks by `fully_shard`, as well."""

from __future__ import annotations

from echelon.parallel.pipeline.prepared import Pipelined
from echelon.parallel.same_gradients import SameGradients
from echelon.parallel.sharding import FSDPPrepared

__all__ = ["ShardedStages"]


class ShardedStages(Pipelined, FSDPPrepared):
    """What `fully_shard` reduces after a backward pass that a schedule calls."""

    def passes_begin(self, *, several: bool) -> None:
        reduction = self.reduction
        defers = reduction.requires_gradient_sync and not reduction.requires_all_reduce and len(self.averaged) > 1
        if defers and not several and self._same is None:
            self._same = SameGradients(self.module)  # before the forward passes, which it watches

    def backward_begins(self, *, last: bool, number: int, several: bool) -> None:
        if several and self.reduction.requires_gradient_sync:
            return  # passes of several stages do not reach the same parameters, so no all-reduce can wait
        if self._same is not None and number:
            self._same.check(last=False)
        self.accumulate(last)

    def passes_end(self) -> None:
        if self._same is not None:
            self._same.check(last=True)
