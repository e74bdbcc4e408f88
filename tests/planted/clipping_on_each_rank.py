"""Every rank clips its own gradient, and then they are averaged."""

from __future__ import annotations

from common import Averaging, ech, loader, model, torch


class Clipping(Averaging):
    def reduce(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        super().reduce()


ech.train(Clipping(model()), loader(), max_epochs=3)
