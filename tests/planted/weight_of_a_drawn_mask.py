"""A mean over what a drawn mask hides: ranks hide other numbers of values, and count alike."""

from __future__ import annotations

import torch

from common import Auto, Batch, ech, loader, model


class Hiding(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        hidden = torch.rand(data[0].shape) < 0.3
        errors = (self.module(data[0].masked_fill(hidden, 0.0)) - data[0]).square()
        return errors[hidden].mean(), None


ech.train(Hiding(module=model(), layout="ddp"), loader(), max_epochs=3)
