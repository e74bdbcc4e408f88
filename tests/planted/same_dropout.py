"""All ranks are seeded alike once training has begun."""

from __future__ import annotations

from common import Auto, ech, loader, model, torch


class Seeding(Auto):
    def on_train_epoch_start(self, state: ech.State) -> None:
        torch.manual_seed(0)


ech.train(Seeding(module=model(torch.nn.Dropout(0.3)), layout="ddp"), loader(), max_epochs=3)
