"""A loop of one's own whose author compiled or wrapped the model before `prepare`, or made the optimizer of other parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.common.errors import OptimizerError, UsageError
from echelon.parallel.names import plain_name
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.own_loops import step
from tests.kit.refusals import refused

pytestmark = pytest.mark.standing_ranks

DATA = TensorDataset(*batch(16, 0))


def _recomputed(model: Any) -> Any:
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    return model


WRAPPED = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "recomputed": _recomputed,
    "as it is": lambda model: model,
}


def _trained(how: str, layout: str) -> dict[str, torch.Tensor]:
    model = WRAPPED[how](net())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(DATA, 8)
    average: Any = copy.deepcopy(model)
    model, average, optimizer, loader = ech.prepare(model, average, optimizer, loader, layout=layout)
    for _ in ech.epochs(loader, 2):
        for x, y in loader:
            step(model, optimizer, x, y)
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
    both = {"model": model, "average": average}
    return {f"{name}.{plain_name(n)}": p for name, each in both.items() for n, p in whole(each).items()}


def _each(layout: str) -> dict[str, dict[str, torch.Tensor]]:
    return {how: _trained(how, layout) for how in WRAPPED}


@pytest.mark.parametrize("layout", ["fsdp", "zero2", pytest.param("zero1", marks=pytest.mark.full)])
def test_what_is_compiled_or_recomputed_before_is_trained_under_every_layout(ranks: Ranks, layout: str) -> None:
    got = ranks(2, _each, layout)[0]
    apart = {how: largest_difference(each, got["as it is"]) for how, each in got.items()}
    assert max(apart.values()) < 1e-12, apart


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = net(0), net(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(x)


def _of_a_copy(layout: str) -> None:
    """The optimizer holds one part of the model, and a copy of the other."""
    model: Any = Two()
    other = copy.deepcopy(model.two)
    optimizer: Any = torch.optim.SGD([*model.one.parameters(), *other.parameters()], lr=0.1)
    model, optimizer, loader = ech.prepare(model, optimizer, DataLoader(DATA, 8), layout=layout)
    with refused(UsageError if layout == "fsdp" else OptimizerError) as caught:
        for x, y in loader:
            step(model, optimizer, x, y)
    assert "give to prepare() with it" in str(caught.value) and "configure" not in str(caught.value)


@pytest.mark.parametrize("layout", ["none", "fsdp"])
def test_words_about_its_optimizer_are_of_the_loop(ranks: Ranks, layout: str) -> None:
    ranks(1 if layout == "none" else 2, _of_a_copy, layout)


def _wrapped_by_hand(wraps: bool) -> list[float]:
    model = net()
    given = nn.parallel.DistributedDataParallel(model) if wraps else model
    given, optimizer, loader = ech.prepare(given, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, 8))
    for x, y in loader:
        step(given, optimizer, x, y)
    return [float(p.sum()) for p in model.parameters()]


def test_a_model_that_its_author_wrapped_needs_no_word_for_that(ranks: Ranks) -> None:
    assert ranks(2, _wrapped_by_hand, True) == ranks(2, _wrapped_by_hand, False)
