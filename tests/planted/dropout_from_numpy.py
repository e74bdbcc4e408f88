"""Dropout by hand from numpy, in a state that all ranks share."""

from __future__ import annotations

import numpy as np

from common import Auto, Batch, ech, loader, model, nn, torch


class Dropping(Auto):
    def on_train_epoch_start(self, state: ech.State) -> None:
        np.random.seed(5)

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        kept = torch.from_numpy(np.random.rand(*data[0].shape) > 0.5)
        return nn.functional.mse_loss(self.module(data[0] * kept), data[1]), None


ech.train(Dropping(module=model(), layout="ddp"), loader(), max_epochs=3)
