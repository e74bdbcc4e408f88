"""A pipeline takes modules as people write them: layers frozen in mid-training, forwards replaced, parts with two names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from tests.conftest import Ranks
from tests.models import Net, batch, largest_difference, net
from tests.units import Regression

pytestmark = pytest.mark.standing_ranks

DATA = [batch(4, seed) for seed in range(6)]
Change = Callable[[nn.Module, int], None]


def _unfreezes(module: nn.Module, update: int) -> None:
    """Only the last layer, then the block of each stage, then all but one: no two ranks see a change at the same time."""
    trained = {1: "last", 2: "blocks.1", 3: "blocks.0", 4: "first"}.get(update)
    for name, parameter in module.named_parameters():
        if update == 0 or update == 5:
            parameter.requires_grad_(name.startswith("last"))
        elif trained is not None and name.startswith(trained):
            parameter.requires_grad_(True)


class _Changing(ech.Callback):
    def __init__(self, change: Change) -> None:
        self._change = change

    def on_train_step_end(self, state: ech.State, unit: Any) -> None:
        self._change(unit.prepared.unwrapped, unit.train_progress.num_steps_completed)


def _plain(module: nn.Module, change: Change | None = None) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for update, (x, y) in enumerate(DATA):
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if change is not None:
            change(module, update + 1)
    return {name: p.detach() for name, p in module.named_parameters()}


def _trained(make: Callable[[], nn.Module], strategy: Any, change: Change | None = None) -> dict[str, torch.Tensor]:
    """The parameters that this rank holds."""
    unit = Regression(module=make(), strategy=strategy)
    ech.train(unit, DATA, max_epochs=1, callbacks=[] if change is None else [_Changing(change)])
    return {name: p.detach() for name, p in unit.prepared.named_parameters()}


def _all(results: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for values in results for name, value in values.items()}


def _frozen_net() -> nn.Module:
    module = net()
    _unfreezes(module, 0)
    return module


def test_layers_of_one_stage_after_another_are_unfrozen_and_frozen_again(ranks: Ranks) -> None:
    """A rank whose own layers stay as they are computes with the others' change all the same."""
    results = ranks(2, _trained, _frozen_net, "pp=2", _unfreezes)
    assert largest_difference(_all(results), _plain(_frozen_net(), _unfreezes)) < 1e-12


def _with_forward() -> nn.Module:
    """Someone else's forward in the place of the class's own, as compilers and libraries put it."""
    module = net()
    own = module.forward
    module.forward = lambda x: own(2 * x)  # type: ignore[method-assign]
    return module


def _compiled() -> nn.Module:
    return torch.compile(net(), backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("make", [_with_forward, pytest.param(_compiled, marks=pytest.mark.full)])
def test_a_replaced_forward_ends_where_the_stage_does(ranks: Ranks, make: Callable[[], nn.Module]) -> None:
    results = ranks(2, _trained, make, "pp=2")
    want = {name.removeprefix("_orig_mod."): value for name, value in _plain(make()).items()}
    assert largest_difference(_all(results), want) < 1e-12


class _NamedTwice(Net):
    """A block is registered in a second place, as PEFT's prompts do it."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.ModuleList([self.blocks[0]])


def _named_twice() -> nn.Module:
    torch.manual_seed(0)
    return _NamedTwice().double()


def test_a_part_with_two_names_lies_in_one_stage(ranks: Ranks) -> None:
    results = ranks(2, _trained, _named_twice, "pp=2")
    assert largest_difference(_all(results), _plain(_named_twice())) < 1e-12
