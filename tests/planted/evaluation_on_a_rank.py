"""Rank 0 has evaluated alone, and did not go back to training mode."""

from __future__ import annotations

from common import Auto, dist, ech, loader, model, nn


class Looking(Auto):
    def on_train_epoch_start(self, state: ech.State) -> None:
        self.module.train(dist.get_rank() > 0)


ech.train(Looking(module=model(nn.Dropout(0.2)), layout="ddp"), loader(), max_epochs=3)
