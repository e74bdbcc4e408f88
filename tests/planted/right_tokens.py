"""A mean over what a mask leaves, weighed by it."""

from __future__ import annotations

from common import Auto, Batch, ech, loader, model, torch


class Masked(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        mask = (data[0][:, :1] > 0).float()
        return ((self.module(data[0]) - data[1]).square() * mask).sum() / mask.sum().clamp(min=1), None

    def weight(self, data: Batch) -> torch.Tensor:
        return (data[0][:, 0] > 0).sum()


ech.train(Masked(module=model(), layout="ddp"), loader(), max_epochs=3)
