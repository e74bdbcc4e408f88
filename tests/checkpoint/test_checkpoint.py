"""Checkpoints: complete or absent, readable under another layout and number of ranks, and a run that goes on from them."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn

import echelon as ech
from echelon.checkpoint import commit
from echelon.common.errors import CheckpointOptionError, RanksDisagreeError
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, whole
from tests.kit.refusals import refused
from tests.kit.saving import make_loader, make_unit, resume, steps_in, train_and_save, uninterrupted
from tests.kit.units import EACH, Regression

pytestmark = pytest.mark.standing_ranks


def test_the_library_need_not_be_installed_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be on Python's path only, as with PYTHONPATH=src."""

    def nothing_is_installed(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing_is_installed)
    train_and_save(tmp_path, "none", 4)
    assert commit.is_saved(tmp_path, 4)


@pytest.mark.full
@pytest.mark.parametrize("layout", EACH)
def test_at_the_same_ranks_a_resumed_run_is_bit_equal_with_dropout(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    options = {"dropout": 0.3}
    want = ranks(2, uninterrupted, layout, 9, **options)[0]
    ranks(2, train_and_save, tmp_path / "c", layout, 4, **options)
    assert largest_difference(ranks(2, resume, tmp_path / "c", layout, 9, **options)[0], want) == 0


def _wrong_on_ranks(folder: Path) -> None:
    some = dist.new_group([0])
    ech.DistributedCheckpointSaver(folder, process_group=dist.new_group())
    with pytest.raises(CheckpointOptionError, match=r"process_group must be None or a group of all 2 ranks, got one of [01]"):
        ech.DistributedCheckpointSaver(folder, process_group=some)
    # As `datetime.now()` in its name has it.
    saver = ech.DistributedCheckpointSaver(folder / f"rank{dist.get_rank()}", save_every_n_updates=2)
    unit = Regression(layout="ddp")
    with pytest.raises(RanksDisagreeError, match=r"ranks disagree about the folder of checkpoints: rank 0: /.*/rank0, rank 1: /"):
        ech.train(unit, [batch(2, 0)], max_epochs=1, callbacks=[saver])
    assert unit.train_progress.num_steps_completed == 0


def test_a_saver_takes_a_group_of_all_ranks_and_one_folder_alone(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _wrong_on_ranks, tmp_path)


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    saver = ech.DistributedCheckpointSaver(tmp_path, save_every_n_updates=4)
    ech.train(make_unit("none"), make_loader(), max_updates=4, callbacks=[saver])
    assert steps_in(tmp_path) == [4]


def test_saves_by_epoch_and_by_evaluation(tmp_path: Path) -> None:
    unit = make_unit("none")
    saver = ech.DistributedCheckpointSaver(tmp_path, save_every_n_epochs=2, save_every_n_eval_epochs=1)
    ech.fit(unit, make_loader(), [batch(2, 0)], max_epochs=2, evaluate_every_n_updates=5, callbacks=[saver])
    assert steps_in(tmp_path) == [5, 6, 10, 12]


@pytest.mark.parametrize("at", [5, 6, 7, 12])
def test_a_save_on_an_epochs_last_step_resumes_in_the_next_epoch(tmp_path: Path, at: int) -> None:
    """Six steps an epoch: the sixth is saved before the epoch is closed. One process needs no group."""
    train_and_save(tmp_path, "none", at)
    assert largest_difference(resume(tmp_path, "none", 15), uninterrupted("none", 15)) == 0 and not dist.is_initialized()


def test_looking_into_a_loader_does_not_move_the_training() -> None:
    unit, loader = make_unit("none"), make_loader()
    next(iter(loader))
    ech.train(unit, loader, max_updates=3)
    other = make_unit("none")
    ech.train(other, loader, max_updates=3)  # a loader that was stopped in mid-epoch, and another unit
    assert (
        largest_difference(whole(unit.module), uninterrupted("none", 3))
        == 0
        == largest_difference(whole(other.module), uninterrupted("none", 3))
    )
    ech.train(unit, loader, max_updates=8)  # the first goes on where it stood
    assert largest_difference(whole(unit.module), uninterrupted("none", 8)) == 0


def test_a_restored_unit_places_a_loader_that_was_not_restored(tmp_path: Path) -> None:
    train_and_save(tmp_path, "none", 4)
    unit = make_unit("none", seed=9)
    ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, unit)
    ech.train(unit, make_loader(), max_updates=8)
    assert largest_difference(whole(unit.module), uninterrupted("none", 8)) == 0


class Level(torchmetrics.Metric):
    """A mean of means, which torchmetrics weighs by how often it was updated."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("level", torch.tensor(0.0), "mean")

    def update(self, level: float) -> None:
        self.level = torch.tensor(level)

    def compute(self) -> torch.Tensor:
        return self.level


class Levels(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.level, self.both = Level(), torchmetrics.MetricCollection({"a": Level(), "b": torchmetrics.SumMetric()})


def test_a_metric_goes_on_as_if_it_had_not_been_restored(tmp_path: Path) -> None:
    unit = Levels()
    for level in (0.0, 10.0, 20.0):
        unit.level(level)
        unit.both(level)
    ech.train(unit, [batch(2, 0)], max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(tmp_path)])
    unit = Levels()
    ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, unit)
    unit.level(50.0)
    unit.both(50.0)
    found = {"level": unit.level.compute(), **unit.both.compute()}
    assert {name: float(value) for name, value in found.items()} == {"level": 20.0, "a": 20.0, "b": 80.0}


class Averages(Regression):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean, self.theirs = ech.Mean(), torchmetrics.MeanMetric()

    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: Any) -> None:
        for metric in (self.mean, self.theirs):
            metric.update(float(10 * dist.get_rank() + step))


def _means_over_ranks(folder: Path, resume: bool) -> list[float]:
    unit = Averages(layout="ddp")
    if resume:
        unit.theirs.update(1000.0)
        assert unit.theirs.compute() == 1000
        ech.DistributedCheckpointSaver.restore_from_latest(folder, unit)
    else:
        ech.train(unit, [batch(2, 0)] * 3, max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(folder)])
    return [unit.mean.compute(), float(unit.theirs.compute())]


@pytest.mark.full
def test_each_rank_gets_its_own_share_of_a_metric_back(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _means_over_ranks, tmp_path / "c", False) == [[6.0, 6.0]] * 2
    assert ranks(2, _means_over_ranks, tmp_path / "c", True) == [[6.0, 6.0]] * 2


def test_weights_alone_can_be_restored(tmp_path: Path) -> None:
    want = train_and_save(tmp_path, "none", 4)
    unit = make_unit("none", seed=5)
    options = ech.callbacks.RestoreOptions(restore_optimizers=False, restore_train_progress=False, restore_lr_schedulers=False)
    ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, unit, restore_options=options)
    assert largest_difference(whole(unit.module), want) == 0
    assert unit.train_progress.num_steps_completed == 0 and not unit.optimizer.state


WRONG = [(name, value) for name in ("save_every_n_epochs", "keep_last_n_checkpoints") for value in (0, -1, 1.5, "2", True)]


@pytest.mark.parametrize(
    ("name", "value"), [("save_every_n_updates", 0), *WRONG, ("options", {"restart": True}), ("best_checkpoint_config", "loss")]
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with refused(CheckpointOptionError):
        ech.DistributedCheckpointSaver(tmp_path, **{name: value})
    with refused(CheckpointOptionError):
        ech.callbacks.SaveOptions(keep_every_n_updates=0)


class Scored(Regression):
    """With a loss and a frozen teacher among its attributes, and a score that each evaluation sets."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.criterion, self.teacher = nn.MSELoss(), nn.Linear(2, 2).requires_grad_(False)
        self.score: float | None = None

    def on_eval_end(self, state: ech.State) -> None:
        self.score = float(self.train_progress.num_steps_completed)


def test_the_last_step_of_an_epoch_is_saved_as_the_beginning_of_the_next(tmp_path: Path) -> None:
    """With a loader that has no state, and with the score of these weights."""
    data = [batch(2, i) for i in range(5)]
    best = ech.callbacks.BestCheckpointConfig("score", "max")
    saver = ech.DistributedCheckpointSaver(tmp_path, save_every_n_updates=5, best_checkpoint_config=best)
    ech.fit(Scored(), data, data[:1], max_epochs=2, callbacks=[saver])
    found = {path.name: commit.verify(path)["metrics"]["score"] for path in commit.candidates(tmp_path)}
    assert found == {"step-00000005": 5.0, "step-00000010": 10.0}
    for steps in (5, 10):
        unit = Scored()
        ech.DistributedCheckpointSaver.restore(tmp_path / f"step-{steps:08}", unit)
        progress = unit.train_progress
        assert (progress.num_epochs_completed, progress.num_steps_completed_in_epoch) == (steps // 5, 0)
        ech.train(unit, data, max_epochs=3)
        assert progress.num_steps_completed == 15
