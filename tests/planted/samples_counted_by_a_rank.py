"""A warm-up by the number of samples, which each rank counts for itself in a variable around a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import Auto, Batch, ech, loader, model, torch


def warm_up() -> Callable[[int], float]:
    count = 0

    def weight(samples: int) -> float:
        nonlocal count
        count += samples
        return min(1.0, count / 64)

    return weight


weight = warm_up()


class Warmed(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, Any]:
        loss, out = super().compute_loss(state, data)
        return loss * weight(len(data[0])), out


ech.train(Warmed(module=model(), layout="ddp"), loader(), max_epochs=1)
