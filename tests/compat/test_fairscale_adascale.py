"""AdaScale: the gain is the paper's, whoever divides the optimizer and the gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.compat.fairscale.nn.data_parallel import ShardedDataParallel
from echelon.compat.fairscale.optim import OSS, AdaScale, AdaScaleWrapper
from echelon.errors import UsageError
from tests.compat.fairscale import loss, mine, updates, values
from tests.conftest import Ranks
from tests.kit.models import Batch, Net, largest_difference, net
from tests.kit.refusals import refused

pytestmark = pytest.mark.standing_ranks

RATE = 0.05


def _groups(module: Net) -> list[dict[str, Any]]:
    return [
        {"params": module.first.parameters()},
        {"params": [*module.blocks.parameters(), *module.last.parameters()], "lr": 0.02},
    ]


def _reference(
    windows: list[list[Batch]], smoothing: float, scale: float, debias: bool = True
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The paper's appendix B.3 over the gradients of each part of a global batch, in one process: gains, square roots aside."""
    module = net()
    optimizer = torch.optim.SGD(_groups(module), lr=RATE)
    gains: list[float] = []
    of_first: list[float] = []
    averages: dict[str, torch.Tensor] = {}
    for t, window in enumerate(windows, 1):
        parts = []
        for each in window:
            grads = torch.autograd.grad(loss(module, each), list(module.parameters()))
            parts.append(dict(zip(module.parameters(), grads, strict=True)))
        count = len(parts)
        variance, square = [], []
        for group in optimizer.param_groups:
            flat = torch.stack([torch.cat([part[p].flatten() for p in group["params"]]) for part in parts])
            mean = flat.mean(0)
            each_variance = flat.square().sum() * scale / count / (count - 1) - mean.square().sum() * scale / (count - 1)
            variance.append(each_variance.clamp(min=1e-6))
            square.append((mean.square().sum() - each_variance / scale).clamp(min=0))
        for name, found in (("variance", torch.stack(variance)), ("square", torch.stack(square))):
            before = averages.get(name, torch.zeros_like(found))
            if debias:
                averages[name] = smoothing * before + (1 - smoothing) * found
            else:
                averages[name] = (
                    (before * (t - 1) + found) / t if t * (1 - smoothing) < 1 else smoothing * before + (1 - smoothing) * found
                )
        weight = 1 - smoothing**t if debias else 1.0
        v, s = averages["variance"] / weight, averages["square"] / weight
        gains.append(float((v.sum() + s.sum()) / (v.sum() / scale + s.sum())))
        of_each = ((v + s) / (v / scale + s)).tolist()
        of_first.append(of_each[0])
        with torch.no_grad():
            for group, gain in zip(optimizer.param_groups, of_each, strict=True):
                for p in group["params"]:
                    p -= group["lr"] * gain * torch.stack([part[p] for part in parts]).mean(0)
    return gains, of_first, values(module)


def _trained(kind: str, data: list[list[Batch]], passes: int, **options: Any) -> tuple[list[float], list[float], Any]:
    module = net()
    make: Callable[..., Any] = torch.optim.SGD
    model: nn.Module
    if kind == "ddp":
        optimizer = AdaScale(make(_groups(module), lr=RATE), num_gradients_to_accumulate=passes, **options)
        model = DistributedDataParallel(module)
    elif kind == "class in OSS":
        divided = OSS(_groups(module), AdaScaleWrapper, num_gradients_to_accumulate=passes, lr=RATE, **options)
        optimizer, model = divided.optim, DistributedDataParallel(module)  # type: ignore[assignment]
    else:
        divided = OSS(_groups(module), make, lr=RATE)
        optimizer = AdaScale(divided, num_gradients_to_accumulate=passes, **options)
        model = ShardedDataParallel(module, divided) if kind == "sharded" else DistributedDataParallel(module)
    stepped = divided if kind == "class in OSS" else optimizer
    gains, of_first = [], []
    for window in data:
        stepped.zero_grad()
        for i, each in enumerate(window):
            if i < len(window) - 1:
                with model.no_sync():  # type: ignore[operator]
                    (loss(model, each) / passes).backward()
            else:
                (loss(model, each) / passes).backward()
        gains.append(optimizer.gain())
        of_first.append(optimizer.gain(0))
        stepped.step()
    assert optimizer.param_groups[0]["lr"] == RATE, "the rate is as before"
    return gains, of_first, values(module)


def _all(data: list[list[Batch]]) -> dict[Any, Any]:
    done: dict[Any, Any] = {}
    own = mine(data)
    for kind in ("ddp", "OSS", "sharded", "class in OSS"):
        done[kind] = _trained(kind, [[each] for each in own], 1, smoothing=0.7)
        done[kind, 2] = _trained(kind, [own[i : i + 2] for i in range(0, len(own), 2)], 2)
    done["scale"] = _trained("ddp", [[each] for each in own], 1, smoothing=0.6, scale=3.0)
    done["plain means"] = _trained("ddp", [[each] for each in own], 1, smoothing=0.6, debias_ewma=False)
    return done


def test_gains_are_the_papers_and_so_are_the_parameters(ranks: Ranks) -> None:
    data = updates(2, steps=6)
    both = [[*a, *b] for a, b in zip(data[::2], data[1::2], strict=True)]
    wanted = {1: _reference(data, 0.7, 2.0), 2: _reference(both, 1 - 4 / 1000, 4.0)}
    wanted |= {"scale": _reference(data, 0.6, 3.0), "plain means": _reference(data, 0.6, 2.0, debias=False)}  # type: ignore[dict-item]
    for done in ranks(2, _all, data):
        for case, (gains, of_first, got) in done.items():
            want = wanted[case] if case in wanted else wanted[2 if isinstance(case, tuple) else 1]
            assert gains == pytest.approx(want[0], rel=1e-6) and of_first == pytest.approx(want[1], rel=1e-6), case
            assert largest_difference(got, want[2]) < 1e-7, case
    assert all(1 < gain < 4 for gain in wanted[2][0])


def _alone(**options: Any) -> tuple[nn.Parameter, AdaScale]:
    weight = nn.Parameter(torch.ones(3))
    return weight, AdaScale(torch.optim.SGD([weight], lr=0.1), num_gradients_to_accumulate=2, **options)


def test_state_groups_schedules_and_errors_in_one_process() -> None:
    with refused(UsageError):
        AdaScale(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    weight, optimizer = _alone(is_scaled_loss=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    (weight * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    for too_early in (optimizer.step, optimizer.zero_grad, optimizer.state_dict, lambda: optimizer.set_scale(3.0)):
        with pytest.raises(AssertionError):
            too_early()
    (weight * torch.tensor([3.0, 2.0, 1.0])).sum().backward()
    # Each of the two has 14, their mean 12: a variance of 2 * 14 - 2 * 12, a square of 12 - 4 / 2.
    assert optimizer.gain() == pytest.approx((4 + 10) / (4 / 2 + 10))
    optimizer.scale_grad_by_num_grads_to_accum()
    optimizer.step()
    assert torch.allclose(weight.detach(), torch.full((3,), 1 - 0.1 * 14 / 12 * 2))
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    saved = copy.deepcopy(optimizer.state_dict())
    other = _alone(is_scaled_loss=False)[1]
    saved["state"]["adascale"] = {key: each.numpy() for key, each in saved["state"]["adascale"].items()}  # as FairScale's
    other.load_state_dict(saved)
    assert other.gain() == pytest.approx(14 / 12) and other.param_groups[0]["lr"] == 0.05
    other.set_scale(4.0)
    assert other.gain() == pytest.approx((2 + 10) / (2 / 4 + 10)) and other.scale == 4.0
    other.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert other.gain(1) == 1.0 and other.smoothing == 1 - 2 / 1000
    other.unhook()
    with refused(UsageError):
        other.set_scale(0.5)
    with refused(UsageError):
        other.set_num_gradients_to_accumulate(0)


def _schedule_over_a_divided_one() -> list[float]:
    module = net()
    optimizer = AdaScale(OSS(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9))
    model = DistributedDataParallel(module)
    for data in mine(updates(2, steps=3)):
        optimizer.zero_grad()
        loss(model, data).backward()
        optimizer.step()
    before = optimizer.gain()
    optimizer.consolidate_state_dict(-1)
    state = optimizer.state_dict()
    again = AdaScale(OSS(net().parameters(), torch.optim.SGD, lr=0.3, momentum=0.9))
    again.load_state_dict(state)
    return [before, again.gain(), again.param_groups[0]["lr"], float(dist.get_rank())]


def test_the_averages_are_in_a_divided_optimizers_state(ranks: Ranks) -> None:
    for before, after, rate, _ in ranks(2, _schedule_over_a_divided_one):
        assert before == after > 1 and rate == 0.1
