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
