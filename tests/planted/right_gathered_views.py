"""Each sample against those of all ranks, in two noisy views: drawn and gathered in one pass."""

from __future__ import annotations

from torch.distributed.nn.functional import all_gather

from common import Auto, Batch, dist, ech, loader, model, nn, torch


class Views(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        one, other = (self.module(nn.functional.dropout(data[0], 0.2)) for _ in range(2))
        first = 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            first, other = dist.get_rank() * len(one), torch.cat(all_gather(other))  # type: ignore[no-untyped-call]
        return nn.functional.cross_entropy(-((one - other.T) ** 2), first + torch.arange(len(one))), None


ech.train(Views(module=model(), layout="ddp"), loader(), max_epochs=3)
