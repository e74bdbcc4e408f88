"""A generator that the dataset holds is copied to the data workers of every rank, so that all add the same noise."""

from __future__ import annotations

import numpy as np

from common import Batch, Rows, ech, model, nn, torch


class Noisy(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i: int) -> Batch:
        x, y = super().__getitem__(i)
        return x + torch.from_numpy(self.rng.normal(0, 0.1, 4)).to(x), y


net = model()
batches = torch.utils.data.DataLoader(Noisy(), 16, shuffle=True, num_workers=2)
net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), batches, layout="ddp")
for _ in ech.epochs(batches, 3):
    for x, y in batches:
        with ech.window(net) as window:
            window.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()
            optimizer.zero_grad()
