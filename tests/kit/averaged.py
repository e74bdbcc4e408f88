"""A layout that is not the library's: this file, and one line that adds it to LAYOUTS.

Each rank has the whole module and samples of its own; once a window, the gradients of all parameters are averaged by one message.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.parallel.axes import Axis
from echelon.parallel.recipe.recipe import Recipe


class AveragedPrepared(ech.layouts.Prepared[nn.Module]):
    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        self.is_last = last
        return super().accumulate(last)

    def _left_alone(self) -> list[nn.Parameter]:
        return []  # after_backward reduces them

    def after_backward(self, loss: torch.Tensor) -> None:
        super().after_backward(loss)
        if self.is_last:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            whole = torch.cat([each.flatten() for each in gradients]) / dist.get_world_size()
            dist.all_reduce(whole)
            for gradient, part in zip(gradients, whole.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


@dataclass(frozen=True)
class Averaged(ech.Strategy):
    name = "averaged"

    def prepare(self, module: nn.Module, world: ech.launching.World, recipe: Recipe) -> ech.layouts.Prepared[Any]:
        return AveragedPrepared(module, [Axis.of(dist.group.WORLD)])
