"""Classes with weights of their own: the mean of a batch is over these, and no `weight` says so; dropout hides it."""

from __future__ import annotations

from common import Auto, Batch, ech, loader, model, nn, torch

CLASSES = torch.tensor([1.0, 6.0])


class Classes(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        score = self.module(data[0])
        return nn.functional.cross_entropy(torch.cat([-score, score], 1), (data[1] > 0).long().flatten(), weight=CLASSES), None


ech.train(Classes(module=model(nn.Dropout(0.1)), layout="ddp"), loader(), max_epochs=3)
