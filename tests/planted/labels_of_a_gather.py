"""Contrast with the rows of all ranks, whose labels on every rank are the first ones: they should begin at rank x rows."""

from __future__ import annotations

from common import Auto, Batch, Rows, ech, model, nn, torch


class Pairs(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        made = self.module(data[0])
        logits = made @ ech.gather(made.tanh()).T
        return nn.functional.cross_entropy(logits, torch.arange(len(made))), None


ech.train(Pairs(module=model(), layout="ddp"), ech.Loader(Rows(), 16), max_epochs=3)
