"""A collate function with a generator of its own masks the samples of every rank alike."""

from __future__ import annotations

from common import Auto, Batch, Rows, ech, model, torch


class Masked:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, samples: list[Batch]) -> Batch:
        x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
        return x * (torch.rand(x.shape, generator=self.generator) < 0.8), y


ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Rows(), 16, collate_fn=Masked()), max_epochs=3)
