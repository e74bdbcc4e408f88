"""FairScale's pair by hand: gradients that only their owners have, a divided optimizer that looks whole."""

from __future__ import annotations

from common import Own, ech, loader, model, torch
from echelon.compat.fairscale.nn import ShardedDataParallel
from echelon.compat.fairscale.optim import OSS

ech.init_from_env()
module = model()
optimizer = OSS(module.parameters(), torch.optim.AdamW, lr=1e-2)
ech.train(Own(ShardedDataParallel(module, optimizer), optimizer), loader(), max_epochs=3)
