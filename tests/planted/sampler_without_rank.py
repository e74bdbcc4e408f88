"""A DataLoader without a DistributedSampler."""

from __future__ import annotations

from common import Auto, Rows, ech, model, torch

batches = torch.utils.data.DataLoader(Rows(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0))
ech.train(Auto(module=model(), layout="ddp"), batches, max_epochs=3)
