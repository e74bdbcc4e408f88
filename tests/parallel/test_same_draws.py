"""Ranks that share layers must draw alike: one that draws for itself is found out before it trains something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import RanksDisagreeError
from tests.conftest import Ranks
from tests.kit.own_loops import own_loop
from tests.kit.refusals import refusal
from tests.kit.units import Hooks, Regression

pytestmark = pytest.mark.standing_ranks

_SAID = "ranks that share layers (tp) must draw the same random numbers, got different ones in update "


def _model(drop: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Dropout(drop))


def _data() -> torch.Tensor:
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(1))


def _loss(module: nn.Module, data: torch.Tensor) -> torch.Tensor:
    return (module(data) - data).square().mean()


def _trained(drop: float, drawing: int, layout: Any) -> int:
    """Somebody draws in each update's hook, for a picture: rank 0 alone, or all."""
    unit = Regression(module=_model(drop), layout=layout, accumulate=2, loss=_loss)
    draw = Hooks(on_train_step_end=lambda *_: torch.randn(1) if dist.get_rank() < drawing else None)
    ech.train(unit, ech.Loader(_data(), 8, accumulate=2), max_epochs=1, callbacks=[draw])
    return unit.window.updates


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp", "tp=2,dp_shard=2"])
def test_a_rank_that_draws_for_itself_is_found_where_dropout_would_differ(ranks: Ranks, layout: str) -> None:
    for said in ranks(2 if layout == "tp" else 4, refusal, _trained, 0.3, 1, layout, kind=RanksDisagreeError):
        assert said.startswith(_SAID)


@pytest.mark.parametrize(("drop", "drawing"), [(0.0, 1), (0.3, 0), (0.3, 2)])
def test_draws_that_part_nothing_are_nobodys_business(ranks: Ranks, drop: float, drawing: int) -> None:
    assert ranks(2, _trained, drop, drawing, "tp") == [4, 4]
    if drawing == 1:
        assert ranks(2, _trained, 0.3, drawing, "ddp") == [4, 4]


def _own_loop(drop: float) -> None:
    def draw(model: nn.Module) -> None:
        if dist.get_rank() == 0:
            torch.randn(1)

    own_loop(_model(drop), ech.Loader(_data(), 8), lambda model, *data: _loss(model, torch.stack(data)), after=draw, layout="tp")


@pytest.mark.full
def test_a_loop_of_ones_own_is_told_too(ranks: Ranks) -> None:
    assert all(said.startswith(_SAID) for said in ranks(2, refusal, _own_loop, 0.3, kind=RanksDisagreeError))
    assert ranks(2, _own_loop, 0.0) == [None, None]
