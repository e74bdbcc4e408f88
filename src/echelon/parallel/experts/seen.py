"""What a router has seen of an update so far. A layer counts in its backward pass, so that nothing counts twice."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Added", "Counted", "Seen"]


class Seen:
    """What a router has seen.

    Attributes:
        counted: of the update under way: choices of each expert, the sum of entropies, tokens. None if there are none.
        latest: the same of the latest update, over all ranks.
        counts: whether the micro-batch counts whose forward pass runs: a number or a tensor, 0 for no. Its backward pass may come
            after the forward passes of others.
        auxiliary: the loss of the latest forward pass that has a gradient, until it is taken.
        was_added: whether the update's losses had it.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.counted: torch.Tensor | None = None
        self.latest: torch.Tensor | None = None
        self.counts: Any = 1
        self.auxiliary: torch.Tensor | None = None
        self.was_added = False

    def add(self, counted: torch.Tensor, counts: Any) -> None:
        if isinstance(counts, torch.Tensor):
            counted = counted * (counts != 0)
        elif not counts:
            counted = torch.zeros_like(counted)
        self.counted = counted if self.counted is None else self.counted + counted

    def forget(self) -> None:
        self.counted, self.auxiliary, self.was_added = None, None, False

    def __deepcopy__(self, memo: Any) -> Seen:
        return Seen(self.num_experts)


class Counted(torch.autograd.Function):
    """A layer's results as they are; their backward pass counts what was chosen."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, seen: Seen, counted: torch.Tensor) -> torch.Tensor:
        ctx.seen, ctx.counted, ctx.counts = seen, counted, seen.counts
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.seen.add(ctx.counted, ctx.counts)
        return grads[0], None, None


class Added(torch.autograd.Function):
    """An auxiliary loss as it is; its backward pass notes that it was added to the loss."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, seen: Seen) -> torch.Tensor:
        ctx.seen = seen
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.was_added = True
        return grads[0], None
