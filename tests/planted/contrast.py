"""A loss over pairs within the batch: no mean over samples, so that splitting the batch changes it."""

from __future__ import annotations

from common import Auto, Batch, ech, loader, model, torch


class Pairs(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        out = self.module(data[0])
        return ((out - out.T) - (data[1] - data[1].T)).square().mean(), None


ech.train(Pairs(module=model(), layout="ddp"), loader(), max_epochs=3)
