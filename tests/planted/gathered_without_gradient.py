"""Each sample against those of all ranks, gathered by a collective through which no gradient flows back."""

from __future__ import annotations

from common import Auto, Batch, dist, ech, loader, model, nn, torch


class Views(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        one, other, first = self.module(data[0]), self.module(data[0] + 0.1), 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            parts = [torch.empty_like(other) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, other.detach())
            first, parts[dist.get_rank()] = dist.get_rank() * len(one), other
            other = torch.cat(parts)
        return nn.functional.cross_entropy(-((one - other.T) ** 2), first + torch.arange(len(one))), None


ech.train(Views(module=model(), layout="ddp"), loader(), max_epochs=3)
