"""An optimizer over whole and split parameters: its groups are the user's own outside of a step, however that ends."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, net, plain_training, seeded, whole
from tests.kit.own_loops import own_loop
from tests.kit.refusals import refusal
from tests.kit.units import Own, Regression, under_each

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


def _trained(make: Any, layout: str) -> dict[str, torch.Tensor]:
    unit = Regression(optimizer=lambda module: make(module.parameters()), layout=layout)
    rank = unit.prepared.data.rank if layout == "fsdp" else 0
    ech.train(unit, [batch(4, 2 * i + rank) for i in range(3)], max_epochs=1)
    return whole(unit.module)


def _plain(make: Any, layout: str) -> dict[str, torch.Tensor]:
    windows = [[batch(4, 2 * i + r) for r in range(2 if layout == "fsdp" else 1)] for i in range(3)]
    return plain_training(windows, optimizer=make)[0]


class Unit(Regression):
    fails_at = 2

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        optimizer = Failing(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.fails_at = self.fails_at
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def _after_an_error() -> list[tuple[int, int, list[float]]]:
    found = []
    for fails_at in (1, 2):
        unit = Unit(module=seeded(Scaled), layout="fsdp")
        unit.fails_at = fails_at
        count = len(list(unit.module.parameters()))
        with pytest.raises(torch.OutOfMemoryError):
            ech.train(unit, [batch(4, i) for i in range(3)], max_epochs=1)
        groups = unit.optimizer.state_dict()["param_groups"]
        unit.lr_scheduler.step()
        found.append((len(groups), len(groups[0]["params"]) - count, unit.lr_scheduler.get_last_lr()))
    return found


@pytest.mark.full
def test_after_a_step_that_failed_the_groups_are_the_users_own(ranks: Ranks) -> None:
    for found in ranks(2, _after_an_error):
        assert [each[:2] for each in found] == [(1, 0)] * 2
        assert all(len(rates) == 1 for *_, rates in found)


def _own_loop(late: bool) -> tuple[int, int, float]:
    model: Any = seeded(Scaled)
    optimizer: Any = Failing(model.parameters(), lr=0.1)
    optimizer.fails_at = 2
    scheduler = None if late else torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(24, 0)), 8, shuffle=True)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="fsdp")
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


class Lamb(torch.optim.Optimizer):
    """Scales each parameter's step by the ratio of two norms, which it reads in the way that `read` says."""

    def __init__(self, parameters: Any, read: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.read = read

    def _of(self, tensor: torch.Tensor) -> Any:
        if self.read == "float":
            return float(tensor.pow(2).sum()) ** 0.5
        return tensor.norm().item() if self.read == "item" else tensor.norm()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                size, change = self._of(p), self._of(p.grad)
                p.sub_(p.grad * (group["lr"] * size / change if change > 0 else group["lr"]))


class Plain(torch.optim.Optimizer):
    """Makes its state by the shape of the parameter alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros(p.shape, dtype=p.dtype))
            p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=0.1)


READS = {read: partial(Lamb, read=read) for read in ("item", "float", "tensor")}


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_an_optimizer_that_reads_norms_reads_those_of_whole_parameters(ranks: Ranks, layout: str) -> None:
    want = _plain(READS["item"], layout)
    for found in ranks(2, under_each, READS, lambda read: _trained(READS[read], layout)):
        assert {read: far for read, got in found.items() if not (far := largest_difference(got, want)) < 1e-12} == {}


def test_an_optimizer_with_a_list_of_its_own_steps_on_all_of_it(ranks: Ranks) -> None:
    keeps = partial(First, keeps=True)
    for got in ranks(2, _trained, keeps, "tp"):
        assert largest_difference(got, _plain(keeps, "tp")) < 1e-12


class First(Lamb):
    """Steps on its first group only; or on a list of its own, with that one's options."""

    def __init__(self, parameters: Any, keeps: bool) -> None:
        super().__init__(parameters, "tensor")
        self.mine = list(self.param_groups[0]["params"]) if keeps else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        for p in self.mine or group["params"]:
            p.sub_(p.grad * group["lr"])


def _searches() -> None:
    """By its closure, in a step of the user's own."""
    module = ech.layouts.prepare_module(net(), torch.device("cpu"), layout="fsdp")
    unit = Own(module, torch.optim.LBFGS(module.parameters()), closure=True)
    ech.train(unit, [batch(4, 0)], max_epochs=1)


def _own_loop_of(make: Any) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(24, 0)), 8, shuffle=True)
    own_loop(net(), loader, lambda model, x, y: nn.functional.mse_loss(model(x), y), optimizer=make, layout="fsdp")


@pytest.mark.parametrize(
    ("train", "words"),
    [
        # Where some layers are split, the first group has some of the parameters.
        (
            lambda: _trained(partial(First, keeps=False), "tp"),
            ("First.step must go through all of self.param_groups", "for group in self.param_groups"),
        ),
        (lambda: _trained(Plain, "fsdp"), ("Plain cannot step parameters that are split", "torch.zeros_like(p)")),
        (lambda: _own_loop_of(Plain), ("Plain cannot step parameters that are split", "torch.zeros_like(p)")),
        (_searches, ("LBFGS cannot step parameters that are split over the ranks", "Train under 'ddp'")),
    ],
)
def test_an_optimizer_that_cannot_step_parts_is_named_with_a_remedy(ranks: Ranks, train: Any, words: tuple[str, ...]) -> None:
    for said in ranks(2, refusal, train):
        assert all(word in said for word in words), said


class Slowly(torch.optim.Optimizer):
    """Wraps another optimizer, and leaves out what torch's own makes of itself."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.state, self.defaults = base, base.state, base.defaults
        self.param_groups = base.param_groups
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure: Any = None) -> None:
        self.base.step()


def _slowly(parameters: Any) -> Slowly:
    return Slowly(torch.optim.SGD(parameters, lr=0.1))


@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp"])
def test_a_wrapper_that_leaves_out_torchs_hooks_trains_all_the_same(ranks: Ranks, layout: str) -> None:
    for got in ranks(2, _trained, _slowly, layout):
        assert largest_difference(got, _plain(_slowly, layout)) < 1e-12
