"""The same mask on every rank, out of an iterator into which nobody can look."""

from __future__ import annotations

from common import Auto, Batch, ech, loader, model, nn, torch

generator = iter([torch.Generator().manual_seed(1)] * 1000)
masks = (torch.rand(16, 4, generator=each) > 0.5 for each in generator)


class Masked(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        return nn.functional.mse_loss(self.module(data[0] * next(masks)[: len(data[0])]), data[1]), None


ech.train(Masked(module=model(), layout="ddp"), loader(), max_epochs=3)
