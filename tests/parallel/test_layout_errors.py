"""Programs that a layout cannot run: named, on all ranks alike, with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import Net, batch, net
from tests.kit.refusals import refusal
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks


class InPlace(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return super().forward(x)


class Changes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace(nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks[1](self.blocks[0](self.first(x))))


class Reads(Net):
    """Standardises a weight, as some convolutions and heads do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        weight = self.blocks[0][0].weight
        return self.last(nn.functional.linear(hidden, weight - weight.mean(1, keepdim=True)))


def _trained(**options: Any) -> None:
    ech.train(Regression(**options), [batch(4, i) for i in range(2)], max_epochs=1)


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(1).double())


def _decodes() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(8, 0)), 8, shuffle=True)
    model: Any = net()
    model, _, _ = ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, layout="fsdp")
    with ech.evaluating(model):
        nn.functional.linear(torch.randn(2, 4).double(), model.first.weight)


def _lazy_in_a_loop() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(8, 0)), 8)
    model = _lazy()
    ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, layout="ddp")


def _clips_by_torch() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(8, 0)), 8)
    model: Any = net()
    model, optimizer, loader = ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, layout="tp=2")
    for x, y in loader:
        with ech.window(model) as window:
            window.backward(nn.functional.mse_loss(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


CASES: dict[str, tuple[Callable[[], None], str]] = {
    "a static graph": (
        lambda: _trained(layout=ech.DDPStrategy(static_graph=True), accumulate=2),
        "static_graph must be False where gradients are accumulated",
    ),
    "lazy, ddp": (lambda: _trained(module=_lazy(), layout="ddp"), "has no shape before the first batch"),
    "lazy, fsdp": (lambda: _trained(module=_lazy(), layout="fsdp"), "has no shape before the first batch"),
    "lazy, in a loop": (_lazy_in_a_loop, "has no shape before the first batch"),
    "in place": (lambda: _trained(module=Changes().double(), layout="fsdp"), "changes its input in place"),
    "a part that is called": (_decodes, "must come from a call of Net itself"),
    "clipping by torch": (_clips_by_torch, "Clip by window.clip_grad_norm_(max_norm)"),
    "a weight that is read": (
        lambda: _trained(module=Reads().double(), layout="tp"),
        "reads a parameter that is split over the ranks",
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_it_is_refused_by_name(ranks: Ranks, name: str) -> None:
    first, second = ranks(2, refusal, CASES[name][0])
    assert first == second and CASES[name][1] in first
