"""Every kind of stream: numpy's and Python's by rank, a generator by rank, and a coin that ranks have to toss alike."""

from __future__ import annotations

import random

import numpy as np

from common import Auto, Batch, dist, ech, loader, model, nn, torch

np.random.seed(dist.get_rank())
random.seed(dist.get_rank())
coin = random.Random(3)


class Drawing(Auto):
    def __init__(self) -> None:
        super().__init__(module=model(nn.Dropout(0.1)), layout="ddp")
        self.masks = [torch.Generator().manual_seed(1 + dist.get_rank())]

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        x = data[0] * (torch.rand(data[0].shape, generator=self.masks[0]) > 0.2)
        x = x * torch.from_numpy(np.random.rand(*x.shape) > 0.2) * random.uniform(0.9, 1.1)
        out = self.module(x) if coin.random() < 0.5 else self.module(x.flip(0)).flip(0)
        return nn.functional.mse_loss(out, data[1]), None


ech.train(Drawing(), loader(42), max_epochs=3)
