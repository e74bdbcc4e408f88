"""A layout that is not the library's: a pipeline of two stages. It is this file, and one line that adds it to LAYOUTS.

Rank 0 has the first half of the model, rank 1 the second half and the losses. All micro-batches of an update go forward before
the first goes backward, as GPipe has it (Huang et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.parallel.prepared import Place
from echelon.parallel.recipe.recipe import Recipe
from tests.kit.models import Net


class Forth(torch.autograd.Function):
    """Sends activations to the next stage, and gets their gradient from it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        dist.send(hidden, 1)
        ctx.shape = hidden.shape
        return hidden.new_zeros(len(hidden), 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        gradient = grads[0].new_empty(ctx.shape)
        dist.recv(gradient, 1)
        return gradient


class From(torch.autograd.Function):
    """Gets activations from the stage before, and sends their gradient back."""

    @staticmethod
    def forward(ctx: Any, room: torch.Tensor) -> torch.Tensor:
        hidden = room.clone()
        dist.recv(hidden, 0)
        return hidden

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        dist.send(grads[0].contiguous(), 0)
        return torch.zeros_like(grads[0])


class Front(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.first, self.block = net.first, net.blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return Forth.apply(x + self.block(x))  # type: ignore[no-any-return]


class Back(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.block, self.last = net.blocks[1], net.last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = From.apply(x.new_zeros(len(x), self.last.in_features).requires_grad_())
        return self.last(x + self.block(x))  # type: ignore[no-any-return]


class StagePrepared(ech.layouts.Prepared[nn.Module]):
    """One stage. Both ranks work on the same samples; the last one knows their losses."""

    forward_is_collective = True
    trains = "scheduled"
    place = Place(stages=[None])  # of all ranks

    def __init__(self, module: nn.Module, world: ech.launching.World) -> None:
        super().__init__(module)
        self.rank = world.rank
        self.data.is_replica = self.rank == 0
        self.order: list[str] = []

    def forward_backward_window(
        self,
        micro_batches: Sequence[Any],
        forward: Callable[[Any], tuple[torch.Tensor, Any]],
        backward: Callable[[torch.Tensor, Any], None],
        *,
        outputs: bool = True,
    ) -> list[tuple[torch.Tensor, Any]]:
        made = []
        for micro_batch in micro_batches:
            self.order.append("forward")
            made.append(forward(micro_batch))
        for (loss, _), micro_batch in zip(made, micro_batches, strict=True):
            self.order.append("backward")
            backward(loss, micro_batch)
        return made

    def after_step(self, wants_stop: bool) -> bool:
        self.order.append("after the step")
        return super().after_step(wants_stop)


@dataclass(frozen=True)
class TwoStages(ech.Strategy):
    name = "two_stages"

    def prepare(self, module: nn.Module, world: ech.launching.World, recipe: Recipe) -> ech.layouts.Prepared[Any]:
        assert isinstance(module, Net) and world.size == 2
        return StagePrepared(Front(module) if world.rank == 0 else Back(module), world)
