"""Clipping in a loop of one's own, where torch's function was left in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import batch, net
from tests.kit.own_loops import own_loop, told

pytestmark = pytest.mark.standing_ranks


def _clipped_by_torch(accumulation: int, right: bool) -> int:
    loader = ech.Loader(list(zip(*batch(16, 0), strict=True)), 4, accumulate=accumulation)

    def clip(window: Any, model: nn.Module) -> None:
        window.clip_grad_norm_(1.0) if right else nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with told() as texts:
        own_loop(net(), loader, epochs=2, clip=clip, layout="ddp")
    return sum("window.clip_grad_norm_" in text for text in texts)


@pytest.mark.full
def test_clipping_that_was_left_in_an_unfinished_update_is_told_once(ranks: Ranks) -> None:
    for accumulation, right, told_of in ((2, False, 1), (2, True, 0), (1, False, 0)):  # the last of whole gradients
        assert ranks(2, _clipped_by_torch, accumulation, right) == [told_of] * 2


def _changed_uncounted(change: str, accumulation: int) -> int:
    """How often it was told, where torch does not count what changes the gradients."""
    module, rows = net(), list(zip(*batch(16, 0), strict=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with told() as texts:
        model, optimizer, loader = ech.prepare(
            module, torch.optim.SGD(module.parameters(), 0.1), ech.Loader(rows, 8, accumulate=accumulation), layout="none"
        )
        for x, y in loader:
            with ech.window(model) as window:
                window.backward(scaler.scale(nn.functional.mse_loss(model(x), y)))
                if change == "scaler":
                    scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                elif change == "data":
                    for parameter in module.parameters():
                        parameter.grad.data.clamp_(-0.01, 0.01)
                    optimizer.step()
                else:
                    optimizer.step()
                optimizer.zero_grad()
    return sum("were changed in the middle" in text for text in texts)


@pytest.mark.parametrize("change", ["scaler", "data", ""])
def test_changes_of_gradients_that_torch_does_not_count_are_told_once(change: str) -> None:
    """They trained on other gradients, in silence: unscaled after each batch, clamped before they were whole."""
    assert _changed_uncounted(change, 2) == bool(change)
    assert _changed_uncounted(change, 1) == 0


def _two_optimizers(change: str, accumulation: int) -> int:
    """How often it was told that gradients were changed where they are not whole yet."""
    first, second = net(), net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    rows = list(zip(*batch(16, 0), strict=True))
    with told() as texts:
        first, second, *optimizers, loader = ech.prepare(
            *(first, second, *optimizers, ech.Loader(rows, 8, accumulate=accumulation)),
            layout="ddp" if dist.is_initialized() else "none",
        )
        for x, y in loader:
            with ech.window(first) as window:
                for model, optimizer in zip((first, second), optimizers, strict=True):
                    window.backward(nn.functional.mse_loss(model(x), y))
                    if change == "torch's":
                        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                    elif change == "window's":
                        window.clip_grad_norm_(0.01, of=optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
    return sum("were changed before its step()" in text for text in texts)


def test_clipping_of_several_optimizers_by_torch_is_told_once(ranks: Ranks) -> None:
    """It clips the gradients of a rank's batch, where one process clips those of the whole batch."""
    assert ranks(2, _two_optimizers, "torch's", 1) == [1, 1]
    assert ranks(1, _two_optimizers, "torch's", 2) == [1]
    assert ranks(1, _two_optimizers, "torch's", 1) == [0]
    assert [ranks(2, _two_optimizers, change, 2)[0] for change in ("window's", "")] == [0, 0]
