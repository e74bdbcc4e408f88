"""Clipping in a loop of one's own, where torch's function was left in it."""

from __future__ import annotations

import pytest
from torch import nn

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import batch, net
from tests.kit.own_loops import own_loop, told


def _clipped_by_torch(layout: str, accumulation: int, right: bool) -> int:
    rows = list(zip(*batch(16, 0), strict=True))
    with told() as texts:
        own_loop(
            net(),
            ech.Loader(rows, 4, accumulate=accumulation),
            lambda model, x, y: nn.functional.mse_loss(model(x), y),
            epochs=2,
            clip=lambda window, model: (
                window.clip_grad_norm_(1.0) if right else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            ),
            layout=layout,
        )
    return sum("window.clip_grad_norm_" in text for text in texts)


@pytest.mark.full
def test_clipping_that_was_left_in_an_unfinished_update_is_told_once(ranks: Ranks) -> None:
    assert ranks(2, _clipped_by_torch, "ddp", 2, False) == [1, 1]
    assert ranks(2, _clipped_by_torch, "ddp", 2, True) == [0, 0]
    assert ranks(2, _clipped_by_torch, "ddp", 1, False) == [0, 0]  # of whole gradients
