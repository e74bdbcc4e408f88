"""From the second epoch on, another share of the loss on each rank: little, and late."""

from __future__ import annotations

from common import Auto, Batch, dist, ech, loader, model, torch


class Late(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        loss, _ = super().compute_loss(state, data)
        return loss * (1 + 0.001 * dist.get_rank() * (self.train_progress.num_epochs_completed > 0)), None


ech.train(Late(module=model(), layout="ddp"), loader(32), max_epochs=3)
