"""Noise on every sample as it is read, the same noise on every rank."""

from __future__ import annotations

import numpy as np

from common import Auto, Batch, Rows, ech, model, torch


class Noisy(Rows):
    noise = np.random.default_rng(5)

    def __getitem__(self, i: int) -> Batch:
        x, y = super().__getitem__(i)
        return x + torch.from_numpy(self.noise.standard_normal(4)).to(x), y


ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Noisy(), 16), max_epochs=3)
