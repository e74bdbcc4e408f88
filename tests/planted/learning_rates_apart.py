"""Every rank steps with a learning rate of its own."""

from __future__ import annotations

from common import Averaging, dist, ech, loader, model, torch

module = model()
ech.train(Averaging(module, torch.optim.SGD(module.parameters(), lr=0.1 * (1 + dist.get_rank()))), loader(), max_epochs=3)
