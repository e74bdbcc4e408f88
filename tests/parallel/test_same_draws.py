"""Ranks that share layers must draw alike: one that draws for itself is found out before it trains something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import RanksDisagreeError
from tests.conftest import Ranks

pytestmark = pytest.mark.standing_ranks

_SAID = "ranks that share layers (tp) must draw the same random numbers, got different ones in update "


def _model(drop: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Dropout(drop))


class _Unit(ech.AutoUnit[torch.Tensor]):
    """Somebody draws in each update's hook, for a picture: rank 0 alone, or all."""

    def __init__(self, drop: float, drawing: int, **options: Any) -> None:
        super().__init__(module=_model(drop), accumulate=2, **options)
        self.drawing = drawing

    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (self.module(data) - data).square().mean(), None

    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: ech.units.TrainStepResults) -> None:
        if dist.get_rank() < self.drawing:
            torch.randn(1)

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.1), None


def _data() -> torch.Tensor:
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(1))


def _trained(drop: float, drawing: int, layout: Any) -> int:
    unit = _Unit(drop, drawing, layout=layout)
    ech.train(unit, ech.Loader(_data(), 8, accumulate=2), max_epochs=1)
    return unit.window.updates


def _refused(train: Callable[..., Any], *given: Any) -> str:
    with pytest.raises(RanksDisagreeError) as refused:
        train(*given)
    return str(refused.value)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp", "tp=2,dp_shard=2"])
def test_a_rank_that_draws_for_itself_is_found_where_dropout_would_differ(ranks: Ranks, layout: str) -> None:
    assert all(said.startswith(_SAID) for said in ranks(2 if layout == "tp" else 4, _refused, _trained, 0.3, 1, layout))


@pytest.mark.parametrize(("drop", "drawing"), [(0.0, 1), (0.3, 0), (0.3, 2)])
def test_draws_that_part_nothing_are_nobodys_business(ranks: Ranks, drop: float, drawing: int) -> None:
    assert ranks(2, _trained, drop, drawing, "tp") == [4, 4]
    if drawing == 1:
        assert ranks(2, _trained, 0.3, drawing, "ddp") == [4, 4]


def _own_loop(drop: float) -> None:
    model = _model(drop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = ech.prepare(model, optimizer, ech.Loader(_data(), 8), layout="tp")
    for _ in ech.epochs(loader, 1):
        for batch in loader:
            with ech.window(model) as window:
                window.backward((model(batch) - batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if dist.get_rank() == 0:
                torch.randn(1)


@pytest.mark.full
def test_a_loop_of_ones_own_is_told_too(ranks: Ranks) -> None:
    assert all(said.startswith(_SAID) for said in ranks(2, _refused, _own_loop, 0.3))
    assert ranks(2, _own_loop, 0.0) == [None, None]
