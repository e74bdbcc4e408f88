"""The optimizer is made before the module is sharded, by a unit of one's own."""

from __future__ import annotations

from common import Own, device, ech, loader, model, torch

module = model()
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
ech.train(Own(ech.layouts.prepare_fsdp(module, device), optimizer), loader(), max_epochs=3)
