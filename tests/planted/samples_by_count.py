"""Inputs are noisier the more samples were read, which each rank's data set counts for itself."""

from __future__ import annotations

from common import Auto, Rows, ech, model, torch


class Noisier(Rows):
    count = 0

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        x, y = super().__getitem__(i)
        noise = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + 0.1 * (self.count // 8) * noise, y


ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Noisier(), 16), max_epochs=1)
