"""Every rank adds noise of its own to gradients that are reduced already."""

from __future__ import annotations

from common import Averaging, dist, ech, loader, model, torch


class Noisy(Averaging):
    def reduce(self) -> None:
        super().reduce()
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.01 * torch.randn_like(parameter.grad)


module = model()
torch.manual_seed(dist.get_rank())
ech.train(Noisy(module), loader(), max_epochs=1)
