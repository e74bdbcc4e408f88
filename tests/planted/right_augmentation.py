"""Samples are changed by random numbers as they are read, which the loader seeds for each."""

from __future__ import annotations

from common import Auto, Batch, Rows, ech, model, torch


class Noisy(Rows):
    def __getitem__(self, i: int) -> Batch:
        return self.x[i] + 0.1 * torch.randn(4), self.y[i]


ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Noisy(), 16, num_workers=1), max_epochs=3)
