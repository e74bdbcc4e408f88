"""Classes with weights of their own, dropout, and a `weight` that says what a batch counts."""

from __future__ import annotations

from common import Auto, Batch, ech, loader, model, nn, torch

CLASSES = torch.tensor([1.0, 6.0])


def classes(data: Batch) -> torch.Tensor:
    return (data[1] > 0).long().flatten()


class Classes(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        score = self.module(data[0])
        return nn.functional.cross_entropy(torch.cat([-score, score], 1), classes(data), weight=CLASSES), None

    def weight(self, data: Batch) -> float:
        return float(CLASSES[classes(data)].sum())


ech.train(Classes(module=model(nn.Dropout(0.1)), layout="ddp"), loader(), max_epochs=3)
