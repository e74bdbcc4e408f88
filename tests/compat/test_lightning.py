"""Lightning's names. Its Trainer's own tests are in test_trainer; a program runs in test_programs."""

from __future__ import annotations

import functools
import importlib
import json
import random
from pathlib import Path

import pytest
import torch

import echelon as ech
from echelon.common.errors import NotHereError, TrainerError, UsageError
from echelon.compat.names import Missing
from tests.kit.refusals import refused


def test_seed_everything_seeds_and_gives_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_everything = importlib.import_module("echelon.compat.lightning").seed_everything
    drawn = []
    for given in (7, None, 8):
        monkeypatch.setenv("PL_GLOBAL_SEED", "7")
        assert seed_everything(given, workers=True) == (given or 7)
        drawn.append((random.random(), float(torch.rand(()))))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_module_is_no_unit() -> None:
    trainer = ech.Trainer(max_epochs=1)
    with refused(TrainerError):
        trainer.fit(torch.nn.Linear(1, 1), [])


def test_a_rank_that_a_program_gives_itself_counts() -> None:
    """As scripts for Slurm have it, of which each process has a number of its own."""
    utilities = importlib.import_module("echelon.compat.lightning.pytorch.utilities")
    own = type(utilities.rank_zero_only)()
    assert own(lambda: "done")() == "done"
    own.rank = 1
    assert own.rank == 1 and own(lambda: "done")() is None


def test_every_name_that_programs_import_works_or_says_what_takes_its_place() -> None:
    """Module by module, of 451 files of 15 public projects, and some that a text search of public files found."""
    published = json.loads((Path(__file__).parent / "lightning_names.json").read_text())
    lacking = []
    for module, names in published.items():
        found = importlib.import_module(f"echelon.compat.{module}")
        # As programs name it that import `lightning.pytorch as pl`.
        by_attributes = functools.reduce(getattr, module.split("."), importlib.import_module("echelon.compat"))
        for name in names.split():
            value = getattr(found, name, None)
            if value is None:
                lacking.append(f"{module}.{name}")
            elif isinstance(value, Missing):
                with pytest.raises(UsageError, match=r"Instead: \S"):
                    value()
            else:
                assert getattr(by_attributes, name) is value
    assert not lacking and len(published) > 60


def test_a_name_that_is_not_there_decides_nothing() -> None:
    found = importlib.import_module("echelon.compat.lightning.pytorch.plugins.precision").DoublePrecision
    with refused(NotHereError):
        bool(found)
    flags = importlib.import_module("echelon.compat.lightning.pytorch.utilities.imports")
    assert [getattr(flags, f"_{name}_AVAILABLE") for name in ("TORCH", "NOTHING_OF_THE_KIND")] == [True, False]


def test_small_utilities_do_what_lightnings_do() -> None:
    utilities = importlib.import_module("echelon.compat.lightning.pytorch.utilities")
    lightning = importlib.import_module("echelon.compat.lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def training_step(self, batch: object, batch_idx: int) -> None: ...

    helpers = importlib.import_module("echelon.compat.lightning.pytorch.utilities.model_helpers")
    assert helpers.is_overridden("training_step", Module()) and not helpers.is_overridden("test_step", Module())
    before = torch.get_rng_state()
    with utilities.isolate_rng():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
