"""A rank without samples computes a batch that only stands in: nothing of it counts, in batch norm or in metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import batch
from tests.kit.own_loops import own_loop
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

SAMPLES, BATCH, EPOCHS = 9, 8, 3  # the last global batch has one sample, and rank 1 none


def _rows() -> list[Any]:
    return list(zip(*batch(SAMPLES, 0), strict=True))


class Columns(nn.Module):
    """Several values of a channel in each row, so that one row is enough for batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(1, 3).double()
        self.norm = nn.BatchNorm1d(3).double()
        self.last = nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 4) -> (B, 1)
        h = self.norm(self.first(x[..., None]).transpose(1, 2))
        return self.last(torch.tanh(h).mean(2))


class Unit(Regression):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"module": Columns(), **options})
        self.metric = torchmetrics.MeanMetric()

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        self.metric.update(torch.ones(len(data[0])), torch.ones(len(data[0])))
        return super().compute_loss(state, data)

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.1), None


def _values(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.detach().double().clone() for name, value in found.items()}


def _plain() -> dict[str, torch.Tensor]:
    module = Columns()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = batch(SAMPLES, 0)
    for _ in range(EPOCHS):
        for at in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x[at : at + BATCH]), y[at : at + BATCH]).backward()
            optimizer.step()
    return _values(module)


def _synchronised(recompute: bool) -> tuple[dict[str, torch.Tensor], float, int]:
    options: dict[str, Any] = {}
    if recompute:
        options["activation_checkpoint_params"] = ech.layouts.ActivationCheckpointParams(
            check_fn=lambda m: isinstance(m, nn.Linear)
        )
    unit = Unit(layout=ech.DDPStrategy(sync_batchnorm=True), **options)
    ech.train(unit, ech.Loader(_rows(), BATCH, shuffle=False), max_epochs=EPOCHS)
    return _values(unit.prepared.unwrapped), float(unit.metric.weight), int(unit.metric.update_count)


@pytest.mark.full
@pytest.mark.parametrize("recompute", [False, True])
def test_synchronised_batch_norm_does_not_take_it_in(ranks: Ranks, recompute: bool) -> None:
    want = _plain()
    found = ranks(2, _synchronised, recompute)
    for ours, _, _ in found:
        for name, value in want.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-12, msg=name)
    assert [weight for _, weight, _ in found] == [EPOCHS * 5, EPOCHS * 4]
    assert [count for *_, count in found] == [EPOCHS * 2, EPOCHS]


def _own_loop() -> dict[str, torch.Tensor]:
    module, loader = Columns(), ech.Loader(_rows(), BATCH, shuffle=False)
    own_loop(module, loader, epochs=EPOCHS, layout=ech.DDPStrategy(sync_batchnorm=True))
    return _values(module)


def test_nor_does_it_in_a_loop_of_ones_own(ranks: Ranks) -> None:
    want = _plain()
    for ours in ranks(2, _own_loop):
        for name, value in want.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-12, msg=name)


def _metric_in_a_module() -> tuple[float, list[str]]:
    class Counts(Columns):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torchmetrics.SumMetric()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.update(len(x))
            return super().forward(x)

    module = Counts()
    unit = Unit(module=module, layout=ech.DDPStrategy(sync_batchnorm=True))
    ech.train(unit, ech.Loader(_rows(), BATCH, shuffle=False), max_epochs=1)
    return float(module.seen.sum_value), [name for name in module.state_dict() if "seen" in name]


def test_a_metric_within_the_module_does_not_count_it(ranks: Ranks) -> None:
    found = ranks(2, _metric_in_a_module)
    assert [seen for seen, _ in found] == [5, 4] and not found[0][1]
