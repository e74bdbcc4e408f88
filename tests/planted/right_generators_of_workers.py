"""Each data worker makes the dataset a generator of its own, from the seed that it was given."""

from __future__ import annotations

import numpy as np
from torch.utils.data import get_worker_info

from common import Batch, Rows, ech, model, nn, torch


class Noisy(Rows):
    rng = np.random.default_rng(0)

    def __getitem__(self, i: int) -> Batch:
        x, y = super().__getitem__(i)
        return x + torch.from_numpy(self.rng.normal(0, 0.1, 4)).to(x), y


data = Noisy()


def seed(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    data.rng = np.random.default_rng(info.seed)


net = model()
batches = torch.utils.data.DataLoader(data, 16, shuffle=True, num_workers=2, worker_init_fn=seed)
net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), batches, layout="ddp")
for _ in ech.epochs(batches, 3):
    for x, y in batches:
        with ech.window(net) as window:
            window.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()
            optimizer.zero_grad()
