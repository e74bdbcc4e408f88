"""Each sample against the others of its rank, in two noisy views."""

from __future__ import annotations

from common import Auto, Batch, ech, loader, model, nn, torch


class Views(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        one, other = (self.module(data[0] + 0.1 * torch.randn_like(data[0])) for _ in range(2))
        return nn.functional.cross_entropy(-((one - other.T) ** 2), torch.arange(len(one))), None


ech.train(Views(module=model(), layout="ddp"), loader(), max_epochs=3)
