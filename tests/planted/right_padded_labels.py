"""Rows of words padded with 0, their labels with -100; some rows are equal, and dropout is on."""

from __future__ import annotations

from typing import Any

from common import Auto, ech, nn, torch

WORDS = 12
rows = [torch.arange(i % 9, i % 9 + 3 + i * 5 % 7) % (WORDS - 1) + 1 for i in range(96)]


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    padded = nn.utils.rnn.pad_sequence(samples, True)
    labels = padded[:, 1:].clone()
    labels[labels == 0] = -100
    return {"words": padded[:, :-1], "labels": labels}


class Words(Auto):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        logits = self.module(data["words"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), data["labels"].flatten()), None

    def weight(self, data: Any) -> Any:
        return (data["labels"] != -100).sum()


torch.manual_seed(0)
network = nn.Sequential(nn.Embedding(WORDS, 8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS))
ech.train(Words(module=network, layout="ddp"), ech.Loader(rows, 16, collate_fn=collate), max_epochs=3)
