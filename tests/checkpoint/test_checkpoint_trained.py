"""Checkpoints that hold what is trained: without the frozen base, under any layout, and never on another base."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.common.errors import CheckpointMismatchError
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, whole
from tests.kit.refusals import refused
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

Saver = ech.DistributedCheckpointSaver


class Based(Net):
    """A frozen base whose statistics move, tied to itself, under a trained end."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.blocks[0][0].weight
        self.double().requires_grad_(False)
        self.last.requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x + self.again(x))


class Tuning(Regression):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01), None


DATA = [batch(4, i) for i in range(6)]


def _unit(layout: str | None = None, seed: int = 0, **options: Any) -> Tuning:
    return Tuning(module=Based(seed), layout=layout, **options)


ONLY_TRAINED = ech.callbacks.SaveOptions(only_trained=True)


def _train(folder: str | Path, layout: str | None, steps: int, **options: Any) -> Any:
    """Goes on in the folder if there is something."""
    unit = _unit(layout, **options)
    Saver.restore_from_latest(folder, unit)
    done = unit.train_progress.num_steps_completed
    if done < steps:
        ech.train(unit, DATA[done:steps], max_epochs=1 + (done > 0), callbacks=[Saver(folder, options=ONLY_TRAINED)])
    buffers = {n: b.clone() for n, b in unit.prepared.unwrapped.named_buffers()}
    return {**whole(unit.module), **buffers}


def _names(folder: Path) -> set[str]:
    newest = max(folder.glob("step-*"))
    return {n for n in json.loads((newest / "index.json").read_text()) if n.startswith("module.")}


@pytest.mark.full
def test_frozen_parameters_are_left_out_and_any_strategy_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(2, _train, str(tmp_path), "fsdp", 3)[0]
    assert _names(tmp_path) == {
        *("module.last.weight", "module.last.bias"),
        *(f"module.norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")),
    }
    for layout in ("zero1", "ddp"):
        for got in ranks(2, _train, str(tmp_path), layout, 3):
            assert largest_difference(got, saved) == 0
    alone = _train(str(tmp_path), None, 3)
    assert largest_difference(alone, saved) == 0 and not torch.equal(alone["norm.running_mean"], torch.zeros(8))


def test_a_run_that_goes_on_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    want = _train(tmp_path / "whole", None, 4)
    _train(tmp_path / "parts", None, 2)
    assert largest_difference(_train(tmp_path / "parts", None, 4), want) == 0
    assert _names(tmp_path / "parts") == _names(tmp_path / "whole")


def _on_another_base(folder: str) -> None:
    unit = _unit("fsdp", seed=1)
    before = whole(unit.module)
    with refused(CheckpointMismatchError):
        Saver.restore_from_latest(folder, unit)
    assert largest_difference(whole(unit.module), before) == 0  # nothing was changed


@pytest.mark.full
def test_another_base_is_refused_by_name(ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _train(tmp_path, None, 2)
    ranks(2, _on_another_base, str(tmp_path))
    with caplog.at_level(logging.WARNING):
        Saver.restore_from_latest(tmp_path, _unit(seed=1), restore_options=ech.callbacks.RestoreOptions(strict=False))
    assert "trained on other frozen parameters" in caplog.text


@pytest.mark.full
def test_what_came_from_a_checkpoint_or_was_frozen_later_stays_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The script would not build it again."""
    unit = _unit()
    ech.train(unit, DATA[:1], max_epochs=1, callbacks=[Saver(tmp_path / "a")])  # all of it
    again = _unit()
    Saver.restore_from_latest(tmp_path / "a", again)
    ech.train(again, DATA[1:2], max_epochs=2, callbacks=[Saver(tmp_path / "b", options=ONLY_TRAINED)])
    assert "module.first.weight" in _names(tmp_path / "b")

    late = _unit()
    late.module.first.requires_grad_()
    saver = Saver(tmp_path / "c", options=ONLY_TRAINED, save_every_n_updates=1)
    late.on_train_step_end = lambda *_: late.module.first.requires_grad_(False)  # type: ignore[method-assign]
    ech.train(late, DATA[:2], max_epochs=1, callbacks=[saver])
    assert "module.first.weight" in _names(tmp_path / "c") and "module.blocks.0.0.weight" not in _names(tmp_path / "c")
    with caplog.at_level(logging.WARNING):
        ech.train(Regression(), DATA[:1], max_epochs=1, callbacks=[Saver(tmp_path / "d", options=ONLY_TRAINED)])
    assert "only_trained=True has no effect" in caplog.text


class Thawing(Tuning):
    """Trains a layer in its second epoch only."""

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.SGD(module.parameters(), lr=0.1), None

    def on_train_epoch_start(self, state: ech.State) -> None:
        self.module.first.requires_grad_(self.train_progress.num_epochs_completed == 1)


def test_a_layer_that_was_trained_in_between_is_saved_though_it_is_frozen_again(tmp_path: Path) -> None:
    saved = []
    for _ in range(2):
        unit = Thawing(module=Based())
        every = ech.Checkpoints(tmp_path, every=100, save_options=ONLY_TRAINED)
        ech.train(unit, DATA[:2], max_epochs=3, checkpoints=every)
        saved.append(whole(unit.module))
    assert largest_difference(*saved) == 0 and "module.blocks.0.0.weight" not in _names(tmp_path)


def test_averages_of_frozen_parameters_are_left_out(tmp_path: Path) -> None:
    options = {"swa_params": ech.units.SWAParams(warmup_steps_or_epochs=0, step_or_epoch_update_freq=1, averaging_method="ema")}
    _train(tmp_path, None, 2, **options)
    names = json.loads((max(tmp_path.glob("step-*")) / "index.json").read_text())
    prefix = "swa_model.parameters."
    assert {n for n in names if n.startswith(prefix)} == {f"{prefix}last.weight", f"{prefix}last.bias"}
    unit = _unit(**options)
    assert Saver.restore_from_latest(tmp_path, unit) and unit.swa_model is not None and unit.swa_model.n_averaged == 2
