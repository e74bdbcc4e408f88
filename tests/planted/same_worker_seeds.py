"""Data workers of all ranks start from one seed, and change their samples by the same random numbers."""

from __future__ import annotations

from common import Auto, Batch, Rows, dist, ech, model, torch


class Noisy(Rows):
    def __getitem__(self, i: int) -> Batch:
        return self.x[i] + 0.1 * torch.randn(4), self.y[i]


ranks = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
sampler = torch.utils.data.DistributedSampler(Noisy(), *ranks)
generator = torch.Generator().manual_seed(3)
batches = torch.utils.data.DataLoader(Noisy(), 8, sampler=sampler, num_workers=1, generator=generator)
ech.train(Auto(module=model(), layout="ddp"), batches, max_epochs=3)
