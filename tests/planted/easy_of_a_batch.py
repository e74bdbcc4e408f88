"""Easy samples count more: those below a threshold, first the local batch's own mean, then that of each rank's batches."""

from __future__ import annotations

from typing import Any

from common import Auto, Batch, Rows, ech, model, torch


class Easy(Auto):
    threshold = 0.0

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, Any]:
        errors = (self.module(data[0]) - data[1]).square()
        mean = float(errors.detach().mean())
        self.threshold = 0.9 * self.threshold + 0.1 * mean if self.threshold else mean
        return (errors * torch.sigmoid(self.threshold - errors.detach())).mean(), None


ech.train(Easy(module=model(), layout="ddp"), ech.Loader(Rows(), 16), max_epochs=1)
