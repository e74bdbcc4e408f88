"""Ranks with batches of other sizes, under DistributedDataParallel, which averages over ranks."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from common import Own, Rows, dist, ech, model, torch

rows, size = Rows(), (6, 2, 3, 5)[dist.get_rank() % 4]
generator = torch.Generator().manual_seed(dist.get_rank())
chosen = [torch.randint(0, len(rows), (size,), generator=generator) for _ in range(10)]
ech.train(Own(DistributedDataParallel(model())), [(rows.x[i], rows.y[i]) for i in chosen], max_epochs=3)
