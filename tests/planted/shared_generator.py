"""A mask over features from a generator that every rank seeds alike: the same units of other samples."""

from __future__ import annotations

from common import Auto, Batch, ech, loader, model, nn, torch


class Masked(Auto):
    def __init__(self) -> None:
        super().__init__(module=model(), layout="ddp")
        self.masks = torch.Generator().manual_seed(1)

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        kept = torch.rand(data[0].shape, generator=self.masks) > 0.5
        return nn.functional.mse_loss(self.module(data[0] * kept), data[1]), None


ech.train(Masked(), loader(), max_epochs=3)
