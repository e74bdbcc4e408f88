"""FairScale's public names, its scaler, its recomputation, and its pair in echelon's own loop."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.compat.fairscale.grad_scaler import ShardedGradScaler
from echelon.compat.fairscale.nn import FullyShardedDataParallel, ShardedDataParallel, checkpoint_wrapper
from tests.compat.fairscale import mine, oss, updates, values
from tests.conftest import Ranks
from tests.kit.models import largest_difference, net, plain_training
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks


def _scaled(infinite: Sequence[int]) -> list[tuple[float, bool]]:
    """An inf on rank 1 alone, in the updates named; the second rank owns nothing."""
    module = nn.Linear(4, 1, bias=False)
    optimizer = oss(module)
    model = ShardedDataParallel(module, optimizer)
    scaler = ShardedGradScaler(2.0**10, 8.0, 0.25, 2)  # FairScale's order: growth before backoff
    seen = []
    for i in range(5):
        before = module.weight.detach().clone()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(2, 4)).float().mean()
        scaler.scale(loss).backward()
        if i in infinite and dist.get_rank() == 0 and module.weight.grad is not None:
            module.weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), not torch.equal(before, module.weight)))
    return seen


def test_an_inf_on_one_rank_makes_all_skip(ranks: Ranks) -> None:
    first, second = ranks(2, _scaled, [1])
    assert first == second == [(1024.0, True), (256.0, False), (256.0, True), (2048.0, True), (2048.0, True)]


def _fused() -> tuple[bool, float]:
    """torch's fused optimizers look for infs themselves."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler = ShardedGradScaler(4.0)
    scaler.scale(weight.sum()).backward()
    assert weight.grad is not None
    if dist.get_rank() == 1:
        weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    return bool((weight == 1).all()), scaler.get_scale()


def test_a_fused_optimizer_skips_with_the_others(ranks: Ranks) -> None:
    assert ranks(2, _fused) == [(True, 2.0), (True, 2.0)]


def test_the_scaler_works_without_a_group() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = ShardedGradScaler(4.0)
    scaler.scale(weight.sum()).backward()
    assert float(weight.grad[0]) == 4.0  # type: ignore[index]
    scaler.step(optimizer)
    scaler.update()
    assert float(weight.detach()[0]) == 0.5


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"out": self.inner(x) * scale}


@pytest.mark.parametrize("offload", [False, True])
def test_a_wrapped_module_is_the_same_object_and_counts_once(offload: bool) -> None:
    torch.manual_seed(0)
    plain = Normed()
    module = copy.deepcopy(plain)
    assert checkpoint_wrapper(module, offload_to_cpu=offload) is module and isinstance(module, Normed)
    gradients = []
    for each in (plain, module):
        torch.manual_seed(1)
        each(torch.arange(12.0).view(3, 4), scale=2.0)["out"].square().sum().backward()
        gradients.append([p.grad for p in each.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert int(module.inner[1].num_batches_tracked) == 1 and module.state_dict().keys() == plain.state_dict().keys()


def _unit(kind: str) -> Regression:
    """An AutoUnit over FairScale's pair, over its FullyShardedDataParallel, or over strategy "zero1"."""
    options: dict[str, Any] = {"optimizer": "AdamW", "clip_grad_norm": 0.5, "accumulate": 2}
    if kind == "zero1":
        return Regression(layout="zero1", **options)
    if kind == "fsdp":
        return Regression(module=FullyShardedDataParallel(net()), **options)
    module = net()
    optimizer = oss(module, "AdamW")

    class Unit(Regression):
        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
            return optimizer, None

    return Unit(module=ShardedDataParallel(module, optimizer), **options)


def _in_the_loop(folder: Path) -> dict[str, Any]:
    data = mine(updates(2, steps=10))
    done: dict[str, Any] = {}
    for kind in ("sharded", "fsdp"):
        saver = ech.DistributedCheckpointSaver(folder / kind)
        straight, first = _unit(kind), _unit(kind)
        ech.train(straight, data, max_epochs=1)
        done[kind], done[f"norms of {kind}"] = _whole(straight), straight.norms
        ech.train(first, data[:6], max_epochs=1, callbacks=[saver])
        for other in ("sharded", "fsdp", "zero1"):
            second = _unit(other)
            ech.DistributedCheckpointSaver.restore_from_latest(folder / kind, second)
            ech.train(second, data[6:], max_epochs=2)
            done[f"{kind} resumed by {other}"] = _whole(second)
    return done


def _whole(unit: Regression) -> dict[str, torch.Tensor]:
    if isinstance(unit.module, FullyShardedDataParallel):
        return dict(unit.module.state_dict())
    return values(unit.module)


@pytest.mark.full
def test_the_loop_trains_saves_and_restores_it(ranks: Ranks, tmp_path: Path) -> None:
    data = updates(2, steps=10)
    windows = [[*a, *b] for a, b in zip(data[::2], data[1::2], strict=True)]
    want, _, norms = plain_training(windows, optimizer="AdamW", clip=0.5)
    for done in ranks(2, _in_the_loop, tmp_path):
        for name, got in done.items():
            if name.startswith("norms"):
                assert got == pytest.approx(norms, rel=1e-9), name
            else:
                assert largest_difference(got, want) < 1e-12, name
