"""The usual DataLoader with a DistributedSampler: the batch is given per rank."""

from __future__ import annotations

from common import Auto, Rows, dist, ech, model, torch

rows = Rows()
sampler = torch.utils.data.DistributedSampler(rows, dist.get_world_size(), dist.get_rank(), seed=1)
batches = torch.utils.data.DataLoader(rows, batch_size=8, sampler=sampler)
ech.train(Auto(module=model(), layout="ddp"), batches, max_epochs=3)
