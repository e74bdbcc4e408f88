"""Weights of drawn noise levels, divided by their mean over the batch of the rank."""

from __future__ import annotations

import torch

from common import Auto, Batch, ech, loader, model


class Levels(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        levels = torch.rand(len(data[0]), 1)
        weights = 1 / (0.1 + levels)
        made = self.module(data[0] + levels * torch.randn_like(data[0]))
        return (weights / weights.mean() * (made - data[1]).square()).mean(), None


ech.train(Levels(module=model(), layout="ddp"), loader(), max_epochs=3)
