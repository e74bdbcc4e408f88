"""Clipping in a loop of one's own, where torch's function was left in it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

import echelon as ech
from tests.conftest import Ranks
from tests.models import batch, net


def _clipped_by_torch(strategy: str, accumulation: int, right: bool) -> int:
    told = _Told()
    logging.getLogger("echelon").addHandler(told)
    rows = list(zip(*batch(16, 0), strict=True))
    module = net()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    loader: Any = ech.Loader(rows, 4, accumulation=accumulation)
    model, optimizer, loader = ech.prepare(module, optimizer, loader, strategy=strategy)
    for _ in ech.epochs(loader, 2):
        for x, y in loader:
            with ech.window(model) as window:
                window.backward(nn.functional.mse_loss(model(x), y))
                if right:
                    window.clip_grad_norm_(1.0)
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return sum("window.clip_grad_norm_" in text for text in told.texts)


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_clipping_that_was_left_in_an_unfinished_update_is_told_once(ranks: Ranks) -> None:
    assert ranks(2, _clipped_by_torch, "ddp", 2, False) == [1, 1]
    assert ranks(2, _clipped_by_torch, "ddp", 2, True) == [0, 0]
    assert ranks(2, _clipped_by_torch, "ddp", 1, False) == [0, 0]  # of whole gradients
