"""Every rank draws initial values of its own, and nothing broadcasts them."""

from __future__ import annotations

from common import Averaging, dist, ech, loader, model, nn, torch

module = model()
torch.manual_seed(dist.get_rank())
nn.init.normal_(module[0].weight)
ech.train(Averaging(module), loader(), max_epochs=3)
