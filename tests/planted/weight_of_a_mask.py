"""The loss is a mean over the rows that a mask leaves, but counts as a mean over all rows."""

from __future__ import annotations

from common import Auto, Batch, ech, loader, model, torch


class Masked(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        mask = (data[0][:, :1] > 0).float()
        return ((self.module(data[0]) - data[1]).square() * mask).sum() / mask.sum(), None


ech.train(Masked(module=model(), layout="ddp"), loader(), max_epochs=3)
