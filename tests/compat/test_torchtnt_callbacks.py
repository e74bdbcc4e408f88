"""TorchTNT's framework, callbacks and loggers by their names there: programs of its run right. The names: test_torchtnt_names."""

from __future__ import annotations

import csv
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.cli.imports import move
from echelon.compat.torchtnt.framework.callbacks import DistributedCheckpointSaver, TorchSnapshotSaver
from tests.compat.reference import run_programs
from tests.kit.models import batch
from tests.kit.units import Regression

HERE = "echelon.compat.torchtnt"


def test_the_loops_are_functions_though_modules_have_their_names() -> None:
    framework = importlib.import_module(f"{HERE}.framework")
    for name in ("train", "evaluate", "predict", "fit"):
        assert importlib.import_module(f"{HERE}.framework.{name}") and inspect.isfunction(getattr(framework, name))


def run_program(name: str, folder: Path) -> str:
    """A program of the folder of this file, after `echelon move`, on two ranks; what it printed."""
    (folder / name).write_bytes(move(Path(__file__).with_name(name).read_bytes()).text)
    (folder / "out").mkdir()
    [said] = run_programs(folder, ("-m", "echelon", "run", "--ranks", "2", name, "out"))
    return said


@pytest.mark.full
@pytest.mark.usefixtures("forked_programs")
def test_a_program_of_torchtnts_runs_when_its_imports_are_changed(tmp_path: Path) -> None:
    """Callbacks, loggers, checkpoints; its parameters are those of one plain process."""
    printed = run_program("torchtnt_program.py", tmp_path)
    plain = _plain()
    there = torch.load(tmp_path / "out" / "parameters.pt")
    assert there.keys() == plain.keys()
    assert max(float((there[name] - plain[name]).abs().max()) for name in plain) < 1e-12
    with open(tmp_path / "out" / "rates.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["optimizers/optimizer/pg:0"]) for row in rows]
    assert rates == [0.1] * 5 + [0.05] * 5 + [0.025] * 5
    assert [float(row["lr_schedulers/lr_scheduler/pg:0"]) for row in rows] == rates
    assert "[Step 3] epochs=3.0000" in printed
    assert [len(each) for each in torch.load(tmp_path / "out" / "predictions.pt")] == [4]
    assert list((tmp_path / "out" / "board").iterdir())


def _plain() -> dict[str, torch.Tensor]:
    """The program's training without any of it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 4, generator=generator).double(), torch.randn(8, 1, generator=generator).double()) for _ in range(5)]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
        optimizer.param_groups[0]["lr"] /= 2
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.full
@pytest.mark.usefixtures("forked_programs")
def test_two_optimizers_in_a_unit_of_ones_own(tmp_path: Path) -> None:
    run_program("torchtnt_gan.py", tmp_path)
    there = torch.load(tmp_path / "out" / "gan.pt")
    for module, found in zip(_plain_gan(), there, strict=True):
        assert max(float((found[name] - value).abs().max()) for name, value in module.state_dict().items()) < 1e-12


def _plain_gan() -> tuple[nn.Module, nn.Module]:
    """The program's training without any of it."""
    torch.manual_seed(0)
    makes = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    judges = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    first, second = torch.optim.SGD(makes.parameters(), lr=0.1, momentum=0.9), torch.optim.SGD(judges.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(6, 5, generator=generator).double() for _ in range(4)]
    loss, ones = nn.BCEWithLogitsLoss(), torch.ones(6, 1).double()
    for _ in range(3):
        for rows in data:
            made = makes(rows[:, :2])
            loss(judges(made), ones).backward()
            first.step()
            first.zero_grad()
            second.zero_grad()
            loss(judges(torch.cat([rows[:, 2:], made.detach()])), torch.cat([ones, 0 * ones])).backward()
            second.step()
            second.zero_grad()
        second.param_groups[0]["lr"] /= 2
    return makes, judges


# --- savers


@pytest.mark.parametrize("kind", [DistributedCheckpointSaver, TorchSnapshotSaver])
def test_savers_save_and_restore(kind: Any, tmp_path: Path) -> None:
    """`restore_with_id` of TorchTNT's TorchSnapshotSaver does nothing, without a word."""
    data, first = [batch(2, i) for i in range(3)], Regression()
    ech.train(first, data, max_epochs=1, callbacks=[kind(str(tmp_path), save_every_n_epochs=1, keep_last_n_checkpoints=2)])
    assert sorted(each.name for each in tmp_path.glob("e*")) == ["epoch_1_train_step_3"]
    path = tmp_path / "epoch_1_train_step_3"
    restores = [
        lambda unit: kind.restore(str(path), unit, train_dataloader=data),
        lambda unit: kind.restore_with_id(str(path), unit),
        lambda unit: kind.restore_from_latest(str(tmp_path), unit),
    ]
    for restore in restores:
        unit = Regression()
        assert restore(unit) is not False
        assert unit.train_progress.num_steps_completed == 3
        assert all(torch.equal(a, b) for a, b in zip(unit.module.parameters(), first.module.parameters(), strict=True))


def test_the_metric_0_is_a_metric(tmp_path: Path) -> None:
    """TorchTNT takes it for a missing one."""
    unit = Regression()
    unit.accuracy = 0.0
    best = ech.callbacks.BestCheckpointConfig(monitored_metric="accuracy", mode="max")
    saver = DistributedCheckpointSaver(str(tmp_path), save_every_n_epochs=1, best_checkpoint_config=best)
    ech.train(unit, [batch(2, 0)], max_epochs=1, callbacks=[saver])
    assert DistributedCheckpointSaver.restore_from_best(str(tmp_path), Regression(), "accuracy", "max", knob_options=None)
