"""Each rank shuffles for itself, and takes its half: some samples come twice in an epoch, some never."""

from __future__ import annotations

from common import Auto, Rows, dist, ech, model, torch

order = torch.randperm(96, generator=torch.Generator().manual_seed(dist.get_rank()))
sampler = order[: 96 // dist.get_world_size()].tolist()
ech.train(Auto(module=model(), layout="ddp"), torch.utils.data.DataLoader(Rows(), 8, sampler=sampler), max_epochs=3)
