"""Defects that were reproduced in TorchTNT: what of them our design could have, and no other test looks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import echelon as ech
from echelon.compat.torchtnt.framework.callbacks import DistributedCheckpointSaver
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.units import Regression


class Resumable:
    """As torchdata's StatefulDataLoader: its state is how many batches it has handed out; its length is a whole epoch's."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.given, self.start = batches, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.given, self.start = self.start, 0
        while self.given < len(self.batches):
            self.given += 1
            yield self.batches[self.given - 1]

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]


class Watching(Regression):
    seen: list[float]
    evaluated: list[float]

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        phase = state.active_phase
        (self.seen if phase is ech.units.ActivePhase.TRAIN else self.evaluated).append(float(data[0][0, 0]))
        return super().compute_loss(state, data)


def watching(**options: Any) -> Watching:
    unit = Watching(lr=1e-3, **options)
    unit.seen, unit.evaluated = [], []
    return unit


def numbered(count: int) -> list[Any]:
    """Batches whose first number is their own."""
    made = [batch(4, i) for i in range(count)]
    for number, (x, _) in enumerate(made):
        x[0, 0] = number
    return made


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_batch_is_lost_or_leaks(tmp_path: Path, prefetch: bool, accumulate: int) -> None:
    """Training ends in the middle of the second epoch, and goes on from there with another process's loader."""
    options = {"accumulate": accumulate, "options": ech.UnitOptions(prefetch=prefetch)}
    first = watching(**options)
    saver = DistributedCheckpointSaver(str(tmp_path))
    ech.train(first, Resumable(numbered(6)), max_updates=8 // accumulate, callbacks=[saver])
    second, loader = watching(**options), Resumable(numbered(6))
    assert DistributedCheckpointSaver.restore_from_latest(str(tmp_path), second, train_dataloader=loader)
    ech.train(second, loader, max_epochs=3)
    assert first.seen + second.seen == [0, 1, 2, 3, 4, 5] * 3
    whole_run = watching(**options)
    ech.train(whole_run, Resumable(numbered(6)), max_epochs=3)
    assert largest_difference(whole(second.module), whole(whole_run.module)) == 0


def test_evaluations_of_limited_length_are_whole() -> None:
    unit, plain = watching(accumulate=2), watching(accumulate=2)
    data = numbered(4)
    ech.fit(unit, data, data[:2], max_epochs=4, max_eval_steps_per_epoch=2, evaluate_every_n_updates=1)
    assert unit.evaluated == [0, 1] * 8
    ech.train(plain, data, max_epochs=4)
    assert largest_difference(whole(unit.module), whole(plain.module)) == 0


class Two(ech.TrainUnit[Any]):
    """Two modules, one optimizer with two groups for each."""

    def __init__(self, seed: int, shard: Any) -> None:
        super().__init__()
        self.a, self.b = shard(net(seed)), shard(net(seed + 1))
        for name in ("a", "b"):
            first, *rest = getattr(self, name).parameters()
            groups = [{"params": [first], "lr": 0.2}, {"params": rest}]
            setattr(self, f"optimizer_{name}", torch.optim.Adam(groups, lr=0.1))

    def train_step(self, state: ech.State, data: Any) -> None:
        for module, optimizer in ((self.a, self.optimizer_a), (self.b, self.optimizer_b)):
            nn.functional.mse_loss(module(data[0]), data[1]).backward()
            optimizer.step()
            optimizer.zero_grad()


def _by_fully_shard(module: nn.Module) -> nn.Module:
    return fully_shard(module)


def _by_fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def _alike(a: nn.Module, b: nn.Module) -> bool:
    """On this rank: of the older FSDP some parameters are empty."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(*(p.to_local() if isinstance(p, DTensor) else p.detach() for p in pair)) for pair in pairs)


def _two(folder: str) -> list[bool]:
    same = []
    rank, world = dist.get_rank(), dist.get_world_size()
    shares = [(x[rank::world], y[rank::world]) for x, y in (batch(8, i) for i in range(4))]
    for shard in (_by_fully_shard, _by_fsdp1):
        place = f"{folder}/{shard.__name__}"
        unit = Two(0, shard)
        ech.train(unit, shares[:2], max_epochs=1, callbacks=[DistributedCheckpointSaver(place)])
        other = Two(50, shard)
        assert DistributedCheckpointSaver.restore_from_latest(place, other)
        for each in (unit, other):
            ech.train(each, shares[2:], max_epochs=2)
        same += [_alike(unit.a, other.a), _alike(unit.b, other.b)]
    return same


@pytest.mark.full
def test_two_sharded_modules_with_groups_are_saved(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _two, str(tmp_path)) == [[True] * 4] * 2
