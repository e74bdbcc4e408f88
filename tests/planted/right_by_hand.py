"""DistributedDataParallel by hand."""

from __future__ import annotations

from common import Own, ech, loader, model
from torch.nn.parallel import DistributedDataParallel

ech.train(Own(DistributedDataParallel(model())), loader(), max_epochs=3)
