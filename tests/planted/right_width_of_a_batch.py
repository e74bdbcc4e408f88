"""A collate function draws one number for the whole batch, which all ranks draw alike."""

from __future__ import annotations

import random

from common import Auto, Batch, Rows, ech, model, torch

decide = random.Random(3)


def collate(samples: list[Batch]) -> Batch:
    x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return x * decide.choice((0.5, 1.0)), y


ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Rows(), 16, collate_fn=collate), max_epochs=3)
