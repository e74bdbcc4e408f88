"""Stages whose parameters are split over the data-parallel ranks by `fully_shard`, as well."""

from __future__ import annotations

from typing import Any

import torch

from echelon.common.errors import UsageError
from echelon.parallel.fsdp.sharding import FSDPPrepared
from echelon.parallel.guards.grad_presence import SameGradients
from echelon.parallel.guards.messages import explained
from echelon.parallel.pipeline.prepared import Pipelined
from echelon.parallel.tensor.gradients import check_same_loss, check_whole_layers
from echelon.world import agree

__all__ = ["ShardedStages"]


class ShardedStages(Pipelined, FSDPPrepared):
    """What `fully_shard` reduces after a backward pass that a schedule calls."""

    def forward_backward_window(self, *given: Any) -> list[tuple[torch.Tensor, Any]]:
        with explained(self.module):
            made = super().forward_backward_window(*given)
        if not self._is_checked and self.pipeline is not None:
            self._is_checked = True
            self.check_plan(made[0][0])
        return made

    def check_plan(self, loss: torch.Tensor) -> None:
        """After the first update's backward passes, on all ranks: only those of some stages may see what is wrong."""
        found: UsageError | None = None
        try:
            check_same_loss(self.module, loss)
            check_whole_layers(self.module)
        except UsageError as error:
            found = error
        agree.fail_together(found, "a stage")

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
