"""A mean over tokens of batches that are padded to their longest sample, counted as a mean over samples."""

from __future__ import annotations

from typing import Any

from common import Auto, ech, model, nn, torch

generator = torch.Generator().manual_seed(0)
sequences = [torch.randn(1 + i * 5 % 9, 4, generator=generator) for i in range(64)]


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    mask = [torch.ones(len(s), 1) for s in samples]
    return {"x": nn.utils.rnn.pad_sequence(samples, True), "mask": nn.utils.rnn.pad_sequence(mask, True)}


class Tokens(Auto):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        errors = (self.module(data["x"]) - data["x"].sum(2, keepdim=True)) ** 2 * data["mask"]
        return errors.sum() / data["mask"].sum(), None


ech.train(Tokens(module=model(), layout="ddp"), ech.Loader(sequences, 16, collate_fn=collate), max_epochs=3)
