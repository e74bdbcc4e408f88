"""Lightning's names. Its Trainer's own tests are in test_trainer; a program runs in test_programs."""

from __future__ import annotations

import importlib
import random

import pytest
import torch

import echelon as ech
from echelon.contracts.errors import UsageError


@pytest.mark.parametrize("module", ["lightning", "lightning.pytorch"])
def test_names_are_present_or_say_what_takes_their_place(module: str) -> None:
    found = importlib.import_module(f"echelon.compat.{module}")
    assert issubclass(found.Trainer, ech.Trainer)
    for name in ("LightningModule", "LightningDataModule", "Callback", "seed_everything"):
        assert hasattr(found, name)
    with pytest.raises(UsageError, match=r"lightning\.Fabric is not part of echelon\.compat. Instead: "):
        found.Fabric()
    assert not hasattr(found, "nothing_of_the_kind")


def test_a_callback_that_is_not_there_can_be_imported_and_says_so_when_it_is_used() -> None:
    found = importlib.import_module("echelon.compat.lightning.pytorch.callbacks").RichProgressBar
    with pytest.raises(UsageError, match=r"RichProgressBar is not part of echelon\.compat"):
        found()


def test_seed_everything_seeds_and_gives_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_everything = importlib.import_module("echelon.compat.lightning").seed_everything
    drawn = []
    for given in (7, None, 8):
        monkeypatch.setenv("PL_GLOBAL_SEED", "7")
        assert seed_everything(given, workers=True) == (given or 7)
        drawn.append((random.random(), float(torch.rand(()))))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_module_is_no_unit() -> None:
    """It can be called, and was taken for a function that builds one."""
    trainer = ech.Trainer(max_epochs=1)
    with pytest.raises(UsageError, match="unit must be an AutoUnit, or a function that builds a unit, got Linear"):
        trainer.fit(torch.nn.Linear(1, 1), [])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("lightning.pytorch.core.module", "LightningModule"),
        ("lightning.pytorch.callbacks.callback", "Callback"),
        ("lightning.pytorch.callbacks.early_stopping", "EarlyStopping"),
        ("lightning.pytorch.loggers.logger", "Logger"),
        ("lightning.pytorch.loggers.tensorboard", "TensorBoardLogger"),
        ("lightning.pytorch.utilities.exceptions", "MisconfigurationException"),
        ("lightning.pytorch.utilities.rank_zero", "rank_zero_only"),
        ("lightning.pytorch.utilities.types", "STEP_OUTPUT"),
        ("lightning.pytorch.utilities", "move_data_to_device"),
        ("lightning", "__version__"),
    ],
)
def test_names_are_where_programs_import_them_from(module: str, name: str) -> None:
    found = importlib.import_module(f"echelon.compat.{module}")
    by_attributes = importlib.import_module("echelon.compat.lightning")
    for part in module.split(".")[1:]:  # as programs name it that import `lightning.pytorch as pl`
        by_attributes = getattr(by_attributes, part)
    assert getattr(by_attributes, name) is getattr(found, name)


def test_a_rank_that_a_program_gives_itself_counts() -> None:
    """As scripts for Slurm have it, of which each process has a number of its own."""
    utilities = importlib.import_module("echelon.compat.lightning.pytorch.utilities")
    own = type(utilities.rank_zero_only)()
    assert own(lambda: "done")() == "done"
    own.rank = 1
    assert own.rank == 1 and own(lambda: "done")() is None


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        ("lightning.pytorch.cli", "LightningCLI", "argparse"),
        ("lightning.pytorch.tuner", "Tuner", "no search"),
        ("lightning.pytorch.profilers", "PyTorchProfiler", r"echelon\.loop\.callbacks\.PyTorchProfiler"),
        ("lightning.pytorch.callbacks.progress", "TQDMProgressBar", "enable_progress_bar=False"),
        ("lightning.pytorch.strategies", "DeepSpeedStrategy", "zero3"),
        ("lightning.fabric", "Fabric", r"echelon\.prepare_module"),
        ("lightning.fabric.plugins", "MixedPrecision", "precision="),
    ],
)
def test_modules_that_are_not_there_say_what_takes_their_place(module: str, name: str, says: str) -> None:
    found = getattr(importlib.import_module(f"echelon.compat.{module}"), name)
    with pytest.raises(UsageError, match=rf"{name} is not part of echelon\.compat. Instead: .*{says}"):
        found()
