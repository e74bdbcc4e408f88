"""Programs that a layout cannot run: named, on all ranks alike, with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.common.errors import UsageError
from tests.conftest import Ranks
from tests.kit.models import Net, batch, net
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks


def _trained(make: Callable[[], Any]) -> None:
    ech.train(make(), [batch(4, i) for i in range(2)], max_epochs=1)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.inner(x)


class Changes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _decodes() -> None:
    model: Any = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(8, 0)), 8, shuffle=True)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="fsdp")
    with ech.evaluating(model):
        nn.functional.linear(torch.randn(2, 4).double(), model.first.weight)


CASES: dict[str, tuple[Callable[[], None], str]] = {
    "a static graph": (
        lambda: _trained(lambda: Regression(layout=ech.DDPStrategy(static_graph=True), accumulate=2)),
        "static_graph must be False where gradients are accumulated",
    ),
    "lazy, ddp": (
        lambda: _trained(lambda: Regression(module=nn.Sequential(nn.LazyLinear(1).double()), layout="ddp")),
        "has no shape before a first batch",
    ),
    "lazy, fsdp": (
        lambda: _trained(lambda: Regression(module=nn.Sequential(nn.LazyLinear(1).double()), layout="fsdp")),
        "has no shape before a first batch",
    ),
    "in place": (
        lambda: _trained(lambda: Regression(module=Changes().double(), layout="fsdp")),
        "changes in place what it is given",
    ),
    "a part that is called": (_decodes, "must come from a call of Net itself"),
}


def _said(name: str) -> str:
    torch.manual_seed(0)
    with pytest.raises(UsageError) as caught:
        CASES[name][0]()
    return str(caught.value)


@pytest.mark.parametrize("name", list(CASES))
def test_it_is_refused_by_name(ranks: Ranks, name: str) -> None:
    first, second = ranks(2, _said, name)
    assert first == second and CASES[name][1] in first
