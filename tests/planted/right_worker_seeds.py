"""Data workers that their init function seeds by their number and their rank, in every epoch alike."""

from __future__ import annotations

import numpy as np
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from common import Auto, Batch, Rows, ech, model, torch

info = ech.RankInfo()


class Noisy(Rows):
    def __getitem__(self, i: int) -> Batch:
        x, y = super().__getitem__(i)
        return x + torch.from_numpy(np.random.standard_normal(4)).to(x), y


def seed(worker: int) -> None:
    np.random.seed(100 * info.rank + worker)


sampler = DistributedSampler(Noisy(), info.world_size, info.rank)
loader = DataLoader(Noisy(), 8, sampler=sampler, num_workers=1, worker_init_fn=seed)
ech.train(Auto(module=model(), layout="ddp"), loader, max_epochs=3)
