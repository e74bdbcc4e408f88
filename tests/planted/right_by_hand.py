"""DistributedDataParallel by hand."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from common import Own, ech, loader, model

ech.train(Own(DistributedDataParallel(model())), loader(), max_epochs=3)
