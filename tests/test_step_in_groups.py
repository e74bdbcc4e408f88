"""An optimizer over whole and split parameters: its groups are the user's own outside of a step, however that ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.loop.checkpointing.converted import authors_classes
from tests.conftest import Ranks
from tests.models import Net, batch
from tests.units import Regression

pytestmark = pytest.mark.standing_ranks


class Scaled(Net):
    """With a scalar, which stays whole under fsdp."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Failing(torch.optim.SGD):
    """Has no memory left in one of its steps."""

    steps, fails_at = 0, 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == self.fails_at:
            raise torch.OutOfMemoryError("nothing left")
        return super().step(closure)


class Unit(Regression):
    fails_at = 2

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        optimizer = Failing(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.fails_at = self.fails_at
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def _after_an_error() -> list[tuple[int, int, list[float]]]:
    found = []
    for fails_at in (1, 2):
        torch.manual_seed(0)
        unit = Unit(module=Scaled().double(), strategy="fsdp")
        unit.fails_at = fails_at
        count = len(list(unit.module.parameters()))
        with pytest.raises(torch.OutOfMemoryError):
            ech.train(unit, [batch(4, i) for i in range(3)], max_epochs=1)
        groups = unit.optimizer.state_dict()["param_groups"]
        unit.lr_scheduler.step()
        found.append((len(groups), len(groups[0]["params"]) - count, unit.lr_scheduler.get_last_lr()))
    return found


def test_after_a_step_that_failed_the_groups_are_the_users_own(ranks: Ranks) -> None:
    for found in ranks(2, _after_an_error):
        assert [each[:2] for each in found] == [(1, 0)] * 2
        assert all(len(rates) == 1 for *_, rates in found)


def _own_loop(late: bool) -> tuple[int, int, float]:
    torch.manual_seed(0)
    model: Any = Scaled().double()
    optimizer: Any = Failing(model.parameters(), lr=0.1)
    optimizer.fails_at = 2
    scheduler = None if late else torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(24, 0)), 8, shuffle=True)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, strategy="fsdp")
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    failed = 0
    for _ in ech.epochs(loader, 1):
        for x, y in loader:
            with ech.window(model) as window:
                window.backward(nn.functional.mse_loss(model(x), y))
                try:
                    optimizer.step()
                except torch.OutOfMemoryError:
                    failed += len(optimizer.param_groups)
                optimizer.zero_grad()
                scheduler.step()
    return failed, len(optimizer.param_groups), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("late", [False, True])
def test_in_a_loop_of_ones_own_too_and_schedules_go_on(ranks: Ranks, late: bool) -> None:
    for found in ranks(2, _own_loop, late):
        assert found == (1, 1, pytest.approx(0.0125))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1200, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(256, 1200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _classes() -> tuple[set[str], set[str]]:
    module = ech.prepare_module(Words(), torch.device("cpu"), strategy="fsdp")
    before = {type(part).__name__ for part in module.modules()}
    with authors_classes(module):
        return before, {type(part).__name__ for part in module.modules()}


def test_sharded_modules_have_their_authors_classes_for_other_libraries(ranks: Ranks) -> None:
    for before, inside in ranks(2, _classes):
        assert "FSDPEmbedding" in before and inside == {"Words", "Embedding", "ModuleList", "Sequential", "Linear", "Tanh"}
