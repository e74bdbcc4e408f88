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
from echelon.common.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointOptionError,
    RanksDisagreeError,
    UsageError,
)
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.refusals import refused
from tests.kit.saving import DATA, make_loader, make_unit, resume, train_and_save, uninterrupted
from tests.kit.units import EACH, Regression

pytestmark = pytest.mark.standing_ranks


def test_a_world_of_one_needs_no_group(tmp_path: Path) -> None:
    train_and_save(tmp_path, "none", 4)
    assert not dist.is_initialized()
    assert largest_difference(resume(tmp_path, "none", 8), uninterrupted("none", 8)) == 0


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


def _save_each(folder: Path, **options: Any) -> list[str]:
    unit = make_unit("ddp", gradient_accumulation_steps=2)
    loader = ech.Loader(DATA, 8, seed=1, accumulate=2)
    ech.train(unit, loader, max_updates=8, callbacks=[ech.DistributedCheckpointSaver(folder, **options)])
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.full
def test_saves_count_updates_and_old_ones_go(ranks: Ranks, tmp_path: Path) -> None:
    """Each update has two micro-batches: after 3 and 6 updates, and after 8 at the end."""
    names = ranks(2, _save_each, tmp_path / "a", save_every_n_updates=3)[0]
    assert names == ["step-00000003", "step-00000006", "step-00000008"]
    names = ranks(2, _save_each, tmp_path / "b", save_every_n_updates=2, keep_last_n_checkpoints=2)[0]
    assert names == ["step-00000006", "step-00000008"]


def _refuses_groups_of_some(folder: Path) -> str:
    some = dist.new_group([0])
    ech.DistributedCheckpointSaver(folder, process_group=dist.new_group())
    with pytest.raises(UsageError) as caught:
        ech.DistributedCheckpointSaver(folder, process_group=some)
    return str(caught.value)


def test_a_saver_takes_a_group_of_all_ranks_alone(ranks: Ranks, tmp_path: Path) -> None:
    messages = ranks(2, _refuses_groups_of_some, tmp_path)
    assert messages[0] == "process_group must be None or a group of all 2 ranks, got one of 1."
    assert messages[1] == "process_group must be None or a group of all 2 ranks, got one of 0."


def _saves_into_its_own(folder: Path) -> str:
    """As `datetime.now()` in its name has it."""
    saver = ech.DistributedCheckpointSaver(folder / f"rank{dist.get_rank()}", save_every_n_updates=2)
    unit = Regression(layout="ddp")
    with pytest.raises(RanksDisagreeError) as caught:
        ech.train(unit, [batch(2, 0)], max_epochs=1, callbacks=[saver])
    assert unit.train_progress.num_steps_completed == 0
    return str(caught.value)


def test_ranks_that_name_other_folders_are_told_before_they_train(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks(2, _saves_into_its_own, tmp_path):
        assert text.startswith("ranks disagree about the folder of checkpoints: rank 0: /") and "/rank0, rank 1: /" in text


def test_saves_by_epoch_and_by_evaluation(tmp_path: Path) -> None:
    unit = make_unit("none")
    saver = ech.DistributedCheckpointSaver(tmp_path, save_every_n_epochs=2, save_every_n_eval_epochs=1)
    ech.fit(unit, make_loader(), [batch(2, 0)], max_epochs=2, evaluate_every_n_updates=5, callbacks=[saver])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000006", "step-00000010", "step-00000012"]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    saver = ech.DistributedCheckpointSaver(tmp_path, save_every_n_updates=4)
    ech.train(make_unit("none"), make_loader(), max_updates=4, callbacks=[saver])
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def _reference(steps: int, **options: Any) -> dict[str, torch.Tensor]:
    return uninterrupted("none", steps, **options)


@pytest.mark.parametrize("at", [5, 6, 7, 12])
def test_a_save_on_an_epochs_last_step_resumes_in_the_next_epoch(tmp_path: Path, at: int) -> None:
    """Six steps an epoch: the sixth is saved before the epoch is closed."""
    saver = ech.DistributedCheckpointSaver(tmp_path, save_every_n_updates=at)
    ech.train(make_unit("none"), make_loader(), max_updates=at, callbacks=[saver])
    assert largest_difference(resume(tmp_path, "none", 15), _reference(15)) == 0


def test_looking_into_a_loader_does_not_move_the_training() -> None:
    unit, loader = make_unit("none"), make_loader()
    next(iter(loader))
    ech.train(unit, loader, max_updates=3)
    other = make_unit("none")
    ech.train(other, loader, max_updates=3)  # a loader that was stopped in mid-epoch, and another unit
    assert largest_difference(whole(unit.module), _reference(3)) == 0 == largest_difference(whole(other.module), _reference(3))
    ech.train(unit, loader, max_updates=8)  # the first goes on where it stood
    assert largest_difference(whole(unit.module), _reference(8)) == 0


def test_a_restored_unit_places_a_loader_that_was_not_restored(tmp_path: Path) -> None:
    train_and_save(tmp_path, "none", 4)
    unit = make_unit("none", seed=9)
    ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, unit)
    ech.train(unit, make_loader(), max_updates=8)
    assert largest_difference(whole(unit.module), _reference(8)) == 0


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


def _accumulated(folder: Path, accumulation: int, updates: int, resume: bool) -> tuple[dict[str, torch.Tensor], int]:
    unit = make_unit("ddp", seed=7 if resume else 0, gradient_accumulation_steps=accumulation)
    loader = ech.Loader(DATA, 8, seed=1, accumulate=accumulation)
    if resume:
        ech.DistributedCheckpointSaver.restore_from_latest(folder, unit, train_dataloader=loader)
    saver = ech.DistributedCheckpointSaver(folder)
    ech.train(unit, loader, max_updates=updates, callbacks=[saver])
    return whole(unit.module), unit.window.updates


@pytest.mark.full
def test_fewer_ranks_with_more_accumulation_go_on_with_the_same_updates(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, _accumulated, tmp_path / "c", 1, 4, False)
    ((got, updates),) = ranks(1, _accumulated, tmp_path / "c", 4, 9, True)
    assert updates == 9 and largest_difference(got, _reference(9)) < 1e-12


def test_a_fresh_run_does_not_mix_with_an_older_one(tmp_path: Path) -> None:
    train_and_save(tmp_path, "none", 4)
    with refused(CheckpointError):
        train_and_save(tmp_path, "none", 2)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.never = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_a_layer_that_never_got_a_gradient_resumes(tmp_path: Path) -> None:
    def unit() -> Regression:
        return Regression(module=Unused(), optimizer="Adam")

    torch.manual_seed(0)
    first = unit()
    ech.train(first, make_loader(), max_updates=3, callbacks=[ech.DistributedCheckpointSaver(tmp_path)])
    second = unit()
    ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, second)
    for each in (first, second):
        ech.train(each, make_loader(), max_updates=8)
    assert largest_difference(whole(first.module), whole(second.module)) == 0


def test_what_cannot_be_read_back_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path("x")}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    unit = make_unit("none")
    unit.odd = Odd()  # type: ignore[attr-defined]
    with refused(CheckpointError):
        ech.train(unit, make_loader(), max_updates=2, callbacks=[ech.DistributedCheckpointSaver(tmp_path)])
    assert commit.latest(tmp_path) is None


def test_a_flipped_bit_is_found_when_it_is_restored(tmp_path: Path) -> None:
    train_and_save(tmp_path, "none", 2)
    victim = tmp_path / "step-00000002" / "tensors-00000.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with refused(CheckpointCorruptError):
        ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, make_unit("none"))


def test_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    saver = ech.DistributedCheckpointSaver(tmp_path, save_every_n_updates=2)
    ech.train(make_unit("none"), make_loader(), max_updates=4, callbacks=[saver])
    newest = tmp_path / "step-00000004"
    assert commit.latest(tmp_path) == newest
    (newest / "state.safetensors").write_bytes((newest / "state.safetensors").read_bytes()[:-1])
    assert commit.latest(tmp_path) == tmp_path / "step-00000002"
    (tmp_path / "step-00000002" / "manifest.json").write_text("{")
    assert commit.latest(tmp_path) is None


def test_what_a_killed_save_left_is_swept_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".staged-step-00000001").mkdir()
    (tmp_path / ".staged-step-00000001" / "rest.pt").write_text("half")
    train_and_save(tmp_path, "none", 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_nothing_there_is_an_answer_of_its_own(tmp_path: Path) -> None:
    assert not ech.DistributedCheckpointSaver.restore_from_latest(tmp_path / "absent", make_unit("none"))
    with refused(CheckpointNotFoundError):
        ech.DistributedCheckpointSaver.restore(tmp_path, make_unit("none"))


def _restore_other_width(folder: Path) -> str:
    torch.manual_seed(0)
    unit = Regression(module=nn.Linear(4, 1, dtype=torch.float64), optimizer="AdamW", layout="ddp")
    with pytest.raises(CheckpointError) as caught:
        ech.DistributedCheckpointSaver.restore_from_latest(folder, unit)
    return str(caught.value)


def test_another_model_is_refused_on_all_ranks_and_the_parameter_named(ranks: Ranks, tmp_path: Path) -> None:
    train_and_save(tmp_path / "c", "none", 2)
    for text in ranks(2, _restore_other_width, tmp_path / "c"):
        assert "does not fit this model" in text and "module." in text


def test_weights_alone_can_be_restored(tmp_path: Path) -> None:
    want = train_and_save(tmp_path, "none", 4)
    unit = make_unit("none", seed=5)
    options = ech.callbacks.RestoreOptions(restore_optimizers=False, restore_train_progress=False, restore_lr_schedulers=False)
    ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, unit, restore_options=options)
    assert largest_difference(whole(unit.module), want) == 0
    assert unit.train_progress.num_steps_completed == 0 and not unit.optimizer.state


def test_a_users_own_unit_with_two_optimizers_comes_back(tmp_path: Path) -> None:
    class Gan(ech.TrainUnit[Any]):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.a, self.b = net(seed), net(seed + 1)
            self.opt_a = torch.optim.Adam(self.a.parameters(), lr=0.1)
            groups = [{"params": self.b.first.parameters(), "lr": 0.2}, {"params": self.b.last.parameters()}]
            self.opt_b = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
            self.mean = ech.Mean()

        def train_step(self, state: ech.State, data: Any) -> None:
            for module, opt in ((self.a, self.opt_a), (self.b, self.opt_b)):
                nn.functional.mse_loss(module(data[0]), data[1]).backward()
                opt.step()
                opt.zero_grad()
            self.mean.update(1.0)

    data = [batch(4, i) for i in range(6)]
    unit = Gan(0)
    ech.train(unit, data[:3], max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(tmp_path)])
    other = Gan(50)
    ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, other)
    assert other.mean.compute() == 1.0 and other.opt_b.param_groups[0]["lr"] == 0.2
    for each in (unit, other):
        ech.train(each, data[3:], max_epochs=2)
    assert largest_difference(whole(unit.a), whole(other.a)) == 0
    assert largest_difference(whole(unit.b), whole(other.b)) == 0


def test_a_frozen_layer_is_saved_and_has_no_optimizer_state(tmp_path: Path) -> None:
    def frozen(seed: int) -> Regression:
        module = net(seed)
        module.first.requires_grad_(False)
        return Regression(module=module, optimizer="AdamW")

    unit, other = frozen(0), frozen(3)
    ech.train(unit, make_loader(), max_updates=2, callbacks=[ech.DistributedCheckpointSaver(tmp_path)])
    ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, other)
    assert largest_difference(whole(unit.module), whole(other.module)) == 0


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
@pytest.mark.parametrize("name", ["save_every_n_updates", "save_every_n_epochs", "keep_last_n_checkpoints"])
def test_intervals_that_make_no_sense_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with refused(CheckpointOptionError):
        ech.DistributedCheckpointSaver(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [("options", {"restart": True}, "a SaveOptions"), ("best_checkpoint_config", "loss", "a BestCheckpointConfig")],
)
def test_a_saver_names_what_it_wants(tmp_path: Path, name: str, value: Any, what: str) -> None:
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


def test_an_epoch_that_was_whole_when_it_was_saved_is_not_trained_again(tmp_path: Path) -> None:
    data = [batch(2, i) for i in range(5)]
    ech.train(Regression(), data, max_updates=5, callbacks=[ech.DistributedCheckpointSaver(tmp_path)])
    unit = Regression()
    ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, unit)
    unit.train_progress.num_epochs_completed, unit.train_progress.num_steps_completed_in_epoch = 0, 5  # as a kill leaves it
    ech.train(unit, data, max_epochs=2)
    assert unit.train_progress.num_steps_completed == 10
