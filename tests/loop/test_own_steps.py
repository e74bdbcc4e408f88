"""Steps of the user's own over modules of `prepare_module`: penalties, target networks, several backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import UsageError
from tests.conftest import Ranks
from tests.kit.models import Batch, batch, largest_difference, net, whole

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")
STEPS = 4
Step = Callable[[nn.Module, nn.Module, torch.optim.Optimizer, Batch], None]


class _Unit(ech.TrainUnit[Batch]):
    """A trained module and another that follows it."""

    def __init__(self, layout: str, step: Step) -> None:
        super().__init__()
        self.module, self.target = (ech.layouts.prepare_module(net(seed), CPU, layout=layout) for seed in (0, 1))
        with torch.no_grad():
            self.module(batch(2, 0)[0])  # a look before the optimizer is made leaves the parameters that it is to have
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.step = step

    def train_step(self, state: ech.State, data: Batch) -> None:
        self.step(self.module, self.target, self.optimizer, data)


def _trained(layout: str, step: Step) -> Any:
    """Both modules' parameters, or what the training was refused with."""
    unit = _Unit(layout, step)
    try:
        ech.train(unit, [batch(4, 2 * i + dist.get_rank()) for i in range(STEPS)], max_epochs=1)
    except UsageError as error:
        return str(error)
    return whole(unit.module), whole(unit.target)


def _plain(step: Step) -> Any:
    module, target = net(0), net(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for i in range(STEPS):
        (x, y), (more_x, more_y) = batch(4, 2 * i), batch(4, 2 * i + 1)
        step(module, target, optimizer, (torch.cat([x, more_x]), torch.cat([y, more_y])))
    return whole(module), whole(target)


def _move(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _penalty(module: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> None:
    x = data[0].clone().requires_grad_()
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (nn.functional.mse_loss(out, data[1]) + slope.pow(2).sum(1).mean()).backward()
    _move(optimizer)


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("zero2", marks=pytest.mark.full)])
def test_a_gradient_penalty_of_shards_is_refused(ranks: Ranks, layout: str) -> None:
    """The second backward pass would read freed memory."""
    for text in ranks(2, _trained, layout, _penalty):
        assert "create_graph=True must be left out in a backward pass through Net" in text and "'ddp' or 'zero1'" in text


def _adapted(module: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> None:
    """Each row by itself, as MAML's tasks are, to the first order."""
    named, total = dict(module.named_parameters()), torch.zeros((), dtype=torch.float64)
    for x, y in zip(*data, strict=True):
        loss = nn.functional.mse_loss(torch.func.functional_call(module, named, (x,)), y)
        slopes = torch.autograd.grad(loss, list(named.values()))
        moved = {name: p - 0.1 * slope for (name, p), slope in zip(named.items(), slopes, strict=True)}
        total = total + nn.functional.mse_loss(torch.func.functional_call(module, moved, (x,)), y)
    (total / len(data[0])).backward()
    _move(optimizer)


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("zero2", marks=pytest.mark.full)])
def test_calls_of_shards_with_other_parameters_are_refused(ranks: Ranks, layout: str) -> None:
    for text in ranks(2, _trained, layout, _adapted):
        assert "functional_call must have a module with whole parameters, got Net" in text and "'ddp' or 'zero1'" in text


def _twice(module: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> None:
    out = module(data[0])
    nn.functional.mse_loss(out, data[1]).backward(retain_graph=True)
    out.pow(2).mean().backward()
    _move(optimizer)


def test_a_second_backward_pass_that_ddp_does_not_reduce_is_refused(ranks: Ranks) -> None:
    first, second = ranks(2, _trained, "ddp", _twice)
    assert first == second and "differs between ranks" in first and "call backward once" in first


def _in_turn(module: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> None:
    for x, y in (data, (data[0] / 2, data[1])):
        nn.functional.mse_loss(module(x), y).backward()
    _move(optimizer)


def _accumulated(module: Any, target: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> None:
    if hasattr(module, "no_sync"):
        with module.no_sync():
            nn.functional.mse_loss(module(data[0]), data[1]).backward()
    else:
        nn.functional.mse_loss(module(data[0]), data[1]).backward()
    nn.functional.mse_loss(module(data[0] / 2), data[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _follows(module: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> None:
    """A target network, which is written into after it was asked, and then asked again."""
    with torch.no_grad():
        wanted = target(data[0])
    nn.functional.mse_loss(module(data[0]), wanted + data[1]).backward()
    _move(optimizer)
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), module.parameters(), strict=True):
            slow.lerp_(fast, 0.3)


@pytest.mark.full(but=("ddp-_in_turn",))
@pytest.mark.parametrize(
    ("layout", "step"),
    [
        ("ddp", _in_turn),
        ("ddp", _accumulated),
        ("ddp", _penalty),
        ("ddp", _adapted),
        ("zero1", _adapted),
        ("fsdp", _twice),
        *((layout, _follows) for layout in ("ddp", "fsdp", "zero2")),
    ],
)
def test_steps_of_ones_own_train_as_plain_pytorch_does(ranks: Ranks, layout: str, step: Step) -> None:
    """Penalties and target networks, several backward passes, accumulation."""
    want = _plain(step)
    for got in ranks(2, _trained, layout, step):
        assert not isinstance(got, str), got
        assert all(largest_difference(*each) < 1e-12 for each in zip(got, want, strict=True))


class _Recycling(nn.Module):
    """Calls itself without gradients, and gives back a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias = net(), nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, before: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if before is None:
            with torch.no_grad():
                before, _ = self(x, torch.zeros((), dtype=torch.float64))
        return self.inner(x) + 0.1 * before, self.bias


def _recycled(layout: str | None) -> tuple[dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    module = _Recycling() if layout is None else ech.layouts.prepare_module(_Recycling(), CPU, layout=layout)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(4, step)
        out, bias = module(x)
        (nn.functional.mse_loss(out, y) + bias).backward()
        optimizer.step()
        optimizer.zero_grad()
    bias = next(p for name, p in module.named_parameters() if name.endswith("bias") and not p.dim())
    return whole(module), len(getattr(bias, "_backward_hooks", None) or ())


def test_a_module_may_call_itself_without_gradients_and_give_back_a_parameter(ranks: Ranks) -> None:
    want, _ = _recycled(None)
    for got, hooks in ranks(2, _recycled, "fsdp"):
        assert largest_difference(got, want) < 1e-12 and hooks <= STEPS


def _forward_of_its_own() -> list[str]:
    module = nn.Module()
    module.layer = nn.Linear(3, 1)
    module.forward = lambda x: module.layer(x)
    ech.layouts.prepare_module(module, CPU, layout="fsdp")(torch.ones(2, 3)).sum().backward()
    return sorted(name for name, p in module.named_parameters() if p.grad is not None)


def test_a_forward_may_be_the_instances(ranks: Ranks) -> None:
    assert ranks(2, _forward_of_its_own) == [["layer.bias", "layer.weight"]] * 2
