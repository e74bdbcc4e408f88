"""AutoUnit(ema=...): the averages of plain PyTorch under every layout; evaluated with, saved, and gone on with elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.checkpoint.export import export_torch
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

DATA = torch.utils.data.TensorDataset(*batch(24, 0))
DECAY = 0.9


def _plain(updates: int) -> tuple[dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """The averages, the loss with them, and the weights, of plain PyTorch in one process."""
    model, average = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader, done = ech.Loader(DATA, 8, seed=1, options=ech.data.LoaderOptions(dp=(0, 1))), 0
    while done < updates:
        loader.set_epoch(done // 3)
        for x, y in loader:
            if done == updates:
                break
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            done += 1
            decay = min(DECAY, (1 + done) / (10 + done)) if done > 1 else 0.0
            for mine, newest in zip(average.parameters(), model.parameters(), strict=True):
                mine.data.mul_(decay).add_(newest.detach(), alpha=1 - decay)
    x, y = DATA.tensors
    loss = float(nn.functional.mse_loss(average(x), y).detach())
    return dict(average.state_dict()), loss, dict(model.state_dict())


def _trained(
    layout: str, accumulation: int, folder: Path, updates: int, resumed: bool
) -> tuple[dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    unit = Regression(layout=layout, ema=DECAY)
    loader = ech.Loader(DATA, 8, seed=1, accumulate=accumulation)
    assert ech.DistributedCheckpointSaver.restore_from_latest(folder, unit, train_dataloader=loader) is resumed
    saver = ech.DistributedCheckpointSaver(folder, save_every_n_updates=4)
    ech.train(unit, loader, max_updates=updates, callbacks=[saver])
    ech.evaluate(unit, ech.Loader(DATA, 24, shuffle=False))
    with unit.evaluating():
        average = whole(unit.module)
    return average, unit.eval_loss, whole(unit.module)


def _check(got: Any, updates: int) -> None:
    average, loss, weights = _plain(updates)
    assert largest_difference(got[0], average) < 1e-12
    assert abs(got[1] - loss) < 1e-12
    assert largest_difference(got[2], weights) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "accumulation"),
    [
        ("fsdp", 2),
        ("ddp", 1),
        ("zero1", 2),
    ],
)
def test_averages_are_plain_pytorchs_and_go_on_on_other_ranks(
    ranks: Ranks, tmp_path: Path, layout: str, accumulation: int
) -> None:
    for got in ranks(2, _trained, layout, accumulation, tmp_path, 4, False):
        _check(got, 4)
    _check(_trained("none", 1, tmp_path, 7, True), 7)
    for got in ranks(2, _trained, "fsdp", 1, tmp_path, 10, True):
        _check(got, 10)


def _frozen(layout: str) -> tuple[float, float, int]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    model[0].requires_grad_(False)
    unit = Regression(module=model, layout=layout, ema=DECAY)
    first = whole(unit.module)["0.weight"].clone()
    ech.train(unit, ech.Loader(DATA, 8, seed=1), max_updates=6)
    own = dict(unit.prepared.unwrapped.named_buffers())
    mean = own["1.running_mean"].clone()
    with unit.evaluating():
        averaged = dict(unit.prepared.unwrapped.named_buffers())
        frozen = float((whole(unit.module)["0.weight"] - first).abs().max())
        return frozen, float((averaged["1.running_mean"] - mean).abs().max()), int(averaged["1.num_batches_tracked"])


@pytest.mark.parametrize("layout", ["none", "fsdp"])
def test_frozen_parts_stay_and_running_statistics_are_averaged(ranks: Ranks, layout: str) -> None:
    for moved, statistics, batches in ranks(1 if layout == "none" else 2, _frozen, layout):
        assert moved == 0 and statistics > 0 and batches == 6


def test_what_is_exported_loads_into_the_module(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    unit = Regression(module=model(), ema=DECAY)
    ech.train(unit, [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)], max_epochs=1, checkpoints=str(tmp_path / "saved"))
    (folder,) = (tmp_path / "saved").glob("step-*")
    export_torch(folder, tmp_path / "averaged.pt", state="swa_model")
    loaded = model()
    loaded.load_state_dict(torch.load(tmp_path / "averaged.pt"))
    assert unit.swa_model is not None
    with unit.swa_model.applied():
        assert all(torch.equal(value, whole(unit.module)[name]) for name, value in loaded.named_parameters())
    assert not torch.equal(loaded[0].weight, unit.module[0].weight)  # type: ignore[index]
