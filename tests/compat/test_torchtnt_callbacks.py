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
from tests.compat.reference import plain, run_programs
from tests.kit.models import batch, largest_difference
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
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 4, generator=generator).double(), torch.randn(8, 1, generator=generator).double()) for _ in range(5)]
    want = plain(module, data, epochs=3, gamma=0.5, clip=0.2)
    there = torch.load(tmp_path / "out" / "parameters.pt")
    assert largest_difference(there, want) < 1e-12
    with open(tmp_path / "out" / "rates.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["optimizers/optimizer/pg:0"]) for row in rows]
    assert rates == [0.1] * 5 + [0.05] * 5 + [0.025] * 5
    assert [float(row["lr_schedulers/lr_scheduler/pg:0"]) for row in rows] == rates
    assert "[Step 3] epochs=3.0000" in printed
    assert [len(each) for each in torch.load(tmp_path / "out" / "predictions.pt")] == [4]
    assert list((tmp_path / "out" / "board").iterdir())


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
