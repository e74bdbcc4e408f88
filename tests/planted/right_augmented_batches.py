"""Random numbers are drawn as samples are put together into a batch."""

from __future__ import annotations

from common import Auto, Batch, Rows, ech, model, torch


def noisy(samples: list[Batch]) -> Batch:
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    return x + 0.1 * torch.randn_like(x), y


ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Rows(), 16, collate_fn=noisy), max_epochs=3)
