"""A run of four ranks that was resumed has the very bits of one that was not, also where torch sorts its buckets on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, seeded, whole
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

DATA = torch.utils.data.TensorDataset(*batch(96, 0))
SAVED_AT, STEPS = 3, 9


class ByHand(ech.TrainUnit[Any]):
    """Wrapped by its author, and accumulating."""

    def __init__(self) -> None:
        super().__init__()
        self.module = DistributedDataParallel(net(), bucket_cap_mb=1)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)

    def train_step(self, state: ech.State, data: Any) -> None:
        half = len(data[0]) // 2
        with self.module.no_sync():
            torch.nn.functional.mse_loss(self.module(data[0][:half]), data[1][:half]).backward()
        torch.nn.functional.mse_loss(self.module(data[0][half:]), data[1][half:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _made(kind: str) -> Any:
    if kind == "by hand":
        return ByHand()
    if kind == "four linears":  # their gradients are ready in another order than they are registered in
        return Regression(module=seeded(_Backwards, 5), layout="ddp", optimizer="AdamW")
    return Regression(module=net(), layout=kind, optimizer="AdamW")


class _Backwards(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()

        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.head = torch.nn.Linear(4, 1)
        self.register_buffer("passes", torch.zeros(()))  # which the replayed pass has no part in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return self.head(x)


def _whole_and_resumed(folder: str, kinds: list[str]) -> list[float]:
    ech.init_from_env()
    differences = []
    for kind in kinds:
        path = Path(folder) / kind
        unit = _made(kind)
        saver = ech.DistributedCheckpointSaver(path, save_every_n_updates=SAVED_AT)
        ech.train(unit, ech.Loader(DATA, 16, seed=2), max_updates=STEPS, callbacks=[saver])
        again, loader = _made(kind), ech.Loader(DATA, 16, seed=2)
        ech.DistributedCheckpointSaver.restore(path / f"step-{SAVED_AT:08}", again, train_dataloader=loader)
        ech.train(again, loader, max_updates=STEPS)
        differences.append(largest_difference(whole(again.module), whole(unit.module)))
    return differences


@pytest.mark.full
@pytest.mark.parametrize("kinds", [["four linears"], ["ddp", "zero1", "by hand"]], ids=", ".join)
def test_after_a_resume_ddp_adds_in_the_order_in_which_it_added_before(ranks: Ranks, tmp_path: Path, kinds: list[str]) -> None:
    for differences in ranks(4, _whole_and_resumed, str(tmp_path), kinds):
        assert dict(zip(kinds, differences, strict=True)) == dict.fromkeys(kinds, 0.0)
