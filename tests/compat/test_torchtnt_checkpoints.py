"""Checkpoints by TorchTNT's names, at its times. What is expected was seen in TorchTNT."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from echelon.common.errors import CheckpointError, NotHereError, UsageError
from echelon.compat.torchtnt.framework import EvalUnit, PredictUnit, TrainUnit, evaluate, fit, predict, train
from echelon.compat.torchtnt.framework.callbacks import DistributedCheckpointSaver
from echelon.compat.torchtnt.framework.callbacks.base_checkpointer import BaseCheckpointer
from echelon.compat.torchtnt.utils import checkpoint
from echelon.compat.torchtnt.utils.checkpoint import BestCheckpointConfig, CheckpointManager, CheckpointPath, MetricData, Phase
from tests.conftest import Ranks
from tests.kit.models import largest_difference, whole
from tests.kit.refusals import refused
from tests.kit.units import Regression

DATA = [torch.randn(2, 2) for _ in range(5)]


class Saver(BaseCheckpointer):
    """A user's own: an empty file is enough."""

    metadata_fnames = (".metadata",)

    def _checkpoint_impl(self, state: Any, unit: Any, *, checkpoint_id: str, hook: str) -> bool:
        os.makedirs(checkpoint_id, exist_ok=True)
        Path(checkpoint_id, ".metadata").touch()
        return True

    @staticmethod
    def restore(path: str, unit: Any, **options: Any) -> None:
        unit.restored_from = Path(path).name


class Unit(TrainUnit[Any], EvalUnit[Any], PredictUnit[Any]):
    def __init__(self, losses: list[float | None] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.linear.parameters(), lr=0.1)
        self.losses, self.loss, self.saved = losses or [None], None, []  # type: ignore[var-annotated]
        self.seen = Counter()

    def train_step(self, state: Any, data: torch.Tensor) -> None:
        self.loss = self.losses[self.train_progress.num_steps_completed % len(self.losses)]
        self.optimizer.zero_grad()
        self.linear(data).mean().backward()
        self.optimizer.step()

    def eval_step(self, state: Any, data: torch.Tensor) -> None:
        self.seen.n += 1
        self.loss = float(self.eval_progress.num_steps_completed)

    def predict_step(self, state: Any, data: torch.Tensor) -> None:
        self.seen.n += 1

    def on_checkpoint_save(self, state: Any, checkpoint_id: str) -> None:
        assert Path(checkpoint_id).is_dir()
        self.saved.append(Path(checkpoint_id).name)


class Counter:
    n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def _train(unit: Any, saver: Any, epochs: int = 2) -> None:
    train(unit, DATA, max_epochs=epochs, callbacks=[saver])


def _fit(unit: Any, saver: Any, **options: Any) -> None:
    fit(unit, DATA, DATA[:2], max_epochs=2, callbacks=[saver], **options)


T, F = "epoch_{}_train_step_{}", "epoch_{}_train_step_{}_eval_step_{}"
WHEN: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "steps": (_train, {"save_every_n_train_steps": 2}, ["0_2", "0_4", "1_6", "1_8", "1_10", "2_10"]),
    "epochs": (_train, {"save_every_n_epochs": 1}, ["1_5", "2_10"]),
    "the end": (_train, {}, ["2_10"]),
    "the last two": (_train, {"save_every_n_train_steps": 2, "keep_last_n_checkpoints": 2}, ["1_10", "2_10"]),
    "fit": (_fit, {"save_every_n_train_steps": 2}, ["0_2_0", "0_4_0", "1_6_2", "1_8_2", "1_10_2"]),
    "evaluations": (_fit, {"save_every_n_eval_epochs": 1}, ["1_5_2", "2_10_4"]),
    "steps of evaluations": (_fit, {"save_every_n_eval_steps": 1}, ["1_5_1", "1_5_2", "2_10_3", "2_10_4"]),
}


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("epoch")}


@pytest.mark.parametrize("kind", [Saver, DistributedCheckpointSaver])
@pytest.mark.parametrize("case", WHEN)
def test_names_and_times_are_torchtnts(tmp_path: Path, case: str, kind: Any) -> None:
    run, options, names = WHEN[case]
    unit = Unit()
    run(unit, kind(str(tmp_path), **options))
    parts = [name.split("_") for name in names]
    assert _names(tmp_path) == {(T if len(each) == 2 else F).format(*each) for each in parts}
    assert set(unit.saved) >= _names(tmp_path)


def test_evaluations_and_predictions_save_nothing(tmp_path: Path) -> None:
    saver = DistributedCheckpointSaver(tmp_path, save_every_n_eval_steps=2)
    evaluate(Unit(), DATA, callbacks=[saver])
    predict(Unit(), DATA, callbacks=[saver])
    assert not list(tmp_path.iterdir())
    with refused(NotHereError):
        DistributedCheckpointSaver(tmp_path, save_every_n_predict_steps=2)


# By losses, what stays of the best two, and what of the best one.
BEST: list[tuple[str, list[float | None], list[str], list[str]]] = [
    ("min", [3.0, 1.0, 2.0, 5.0, 4.0], ["2_loss=1.0", "3_loss=2.0"], ["2_loss=1.0"]),
    ("max", [3.0, 1.0, 2.0, 5.0, 4.0], ["4_loss=5.0", "5_loss=4.0"], ["4_loss=5.0"]),
    ("min", [1.0, 1.0, 1.0, 1.0, 1.0], ["1_loss=1.0", "2_loss=1.0"], ["1_loss=1.0"]),
    ("min", [float("nan"), 0.5, 0.0, 0.25, 0.75], ["1", "3_loss=0.0", "4_loss=0.25"], ["1", "3_loss=0.0"]),
]


@pytest.mark.parametrize(("mode", "losses", "two", "one"), BEST)
def test_the_best_stay(tmp_path: Path, mode: Any, losses: list[float | None], two: list[str], one: list[str]) -> None:
    """One without the metric is saved while there is room, and not counted."""
    best = BestCheckpointConfig("loss", mode)
    for count, names in ((2, two), (1, one)):
        for kind in (Saver, DistributedCheckpointSaver):
            folder = tmp_path / f"{kind.__name__}{count}"
            saver = kind(folder, save_every_n_train_steps=1, keep_last_n_checkpoints=count, best_checkpoint_config=best)
            train(Unit(losses), DATA, max_steps=5, callbacks=[saver])
            assert _names(folder) == {f"epoch_0_train_step_{name}" for name in names}


def test_what_is_due_before_an_evaluation_has_the_number_of_these_weights(tmp_path: Path) -> None:
    """TorchTNT saves before, and writes down the number of older ones."""
    saver = Saver(tmp_path, save_every_n_epochs=1, best_checkpoint_config=BestCheckpointConfig("loss"))
    _fit(Unit(), saver)
    assert _names(tmp_path) == {"epoch_1_train_step_5_eval_step_2_loss=1.0", "epoch_2_train_step_10_eval_step_4_loss=3.0"}


def test_a_save_waits_for_the_end_of_a_window(tmp_path: Path) -> None:
    data = [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(6)]
    unit = Regression(accumulate=3, module=nn.Linear(4, 2))
    train(unit, data, max_epochs=1, callbacks=[DistributedCheckpointSaver(tmp_path, save_every_n_train_steps=2)])
    assert _names(tmp_path) == {T.format(0, 3), T.format(0, 6), T.format(1, 6)}


def test_asynchronous_saves_remove_the_old_when_the_new_is_whole(tmp_path: Path) -> None:
    unit = Unit()
    saver = DistributedCheckpointSaver(tmp_path, save_every_n_train_steps=1, keep_last_n_checkpoints=2, async_checkpoint=True)
    _train(unit, saver)
    assert _names(tmp_path) == {T.format(1, 10), T.format(2, 10)} and unit.saved[-1] == T.format(2, 10)


def test_base_classes_restore_the_latest_and_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unit = Unit()
    assert not Saver.restore_from_latest(str(tmp_path / "no"), unit)
    assert f"Input dirpath doesn't exist: {tmp_path / 'no'}" in caplog.text
    for name in ("epoch_0_train_step_3", "epoch_1_train_step_9_l=0.5", "epoch_0_train_step_3_l=0.25", "epoch_7_step_1", "other"):
        (tmp_path / name).mkdir()
        if "7" not in name:
            (tmp_path / name / ".metadata").touch()
    assert Saver.restore_from_latest(str(tmp_path), unit) and unit.restored_from == "epoch_1_train_step_9_l=0.5"
    assert Saver.restore_from_best(str(tmp_path), unit, "l", "min") and unit.restored_from == "epoch_0_train_step_3_l=0.25"
    assert not Saver.restore_from_best(str(tmp_path), unit, "accuracy", "min")
    assert f"No checkpoints with metric name accuracy were found in {tmp_path}." in caplog.text
    latest = checkpoint.get_latest_checkpoint_path(str(tmp_path))
    assert latest == f"{tmp_path}/epoch_7_step_1" and isinstance(latest, str)
    assert checkpoint.get_latest_checkpoint_path(str(tmp_path), ["x", ".metadata"]) == f"{tmp_path}/epoch_1_train_step_9_l=0.5"
    assert checkpoint.get_best_checkpoint_path(str(tmp_path), "l", "max") == f"{tmp_path}/epoch_1_train_step_9_l=0.5"
    assert len(checkpoint.get_checkpoint_dirpaths(str(tmp_path))) == 4
    assert [p.metric_data for p in checkpoint.get_checkpoint_dirpaths(str(tmp_path), None, "l")] == [
        MetricData("l", 0.25),
        MetricData("l", 0.5),
    ]
    exists = checkpoint.does_checkpoint_exist
    assert exists(f"{tmp_path}/epoch_0_train_step_3", [".metadata"]) and not exists(f"{tmp_path}/epoch_7_step_1", ".metadata")
    assert not exists(f"{tmp_path}/epoch_0_train_step_3", None)


def test_savers_of_release_0_2_4_run(tmp_path: Path) -> None:
    class Older(Saver):
        metadata_fnames = ()
        metadata_fname = ".metadata"

        def _checkpoint_impl(self, state: Any, unit: Any, *, checkpoint_path: str, hook: str) -> bool:  # type: ignore[override]
            return super()._checkpoint_impl(state, unit, checkpoint_id=checkpoint_path, hook=hook)

    unit = Unit()
    _train(unit, Older(tmp_path, save_every_n_epochs=2))
    assert Older.restore_from_latest(str(tmp_path), unit) and unit.restored_from == T.format(2, 10)


# --- paths


def test_paths_are_parsed_and_compared() -> None:
    path = CheckpointPath("runs/a/", 3, {Phase.TRAIN: 500, Phase.EVALUATE: 9}, MetricData("val_loss", 0.25))
    assert str(path) == path.path == "runs/a/epoch_3_train_step_500_eval_step_9_val_loss=0.25"
    again = CheckpointPath.from_str(path.path + "/")
    assert again == path and hash(again) == hash(path) and pickle.loads(pickle.dumps(path)) == path
    assert CheckpointPath.from_str("a/epoch_1_step_2_l=1e-05").metric_data == MetricData("l", 1e-05)
    for odd in (
        "foo",
        "foo/epoch_1",
        "epoch_1_step_2",
        "foo/epoch_1_train_step_x",
        "foo/epoch_1_step_2_l=",
        "foo/epoch_1_step_2/x",
    ):
        with refused(UsageError):
            CheckpointPath.from_str(odd)
    for value in (float("nan"), float("inf")):
        with refused(UsageError):
            CheckpointPath("a", 0, 1, MetricData("l", value))
    oldest_first = [
        "epoch_0_train_step_9",
        "epoch_1_step_2",
        "epoch_1_train_step_2",
        "epoch_1_train_step_3",
        "epoch_1_train_step_2_eval_step_1",
        "epoch_1_train_step_3_eval_step_1",
    ]
    paths = [CheckpointPath.from_str(f"a/{name}") for name in oldest_first]
    assert sorted([*paths[3:], *paths[:3]]) == paths and max(paths) is paths[-1] and not paths[0].newer_than(paths[0])


def test_odd_metrics_are_one_part_of_a_name() -> None:
    path = CheckpointPath("a", 1, 2, MetricData("val/loss 100%_x=y", -0.5))
    assert "/" not in path.path.removeprefix("a/") and CheckpointPath.from_str(path.path) == path


def test_paths_are_compared_by_their_metric() -> None:
    low, high = (CheckpointPath("a", 0, 1, MetricData("l", value)) for value in (0.0, 1.0))
    older, newer = (CheckpointPath("a", 0, step) for step in (1, 2))
    assert low.more_optimal_than(high, "min") and high.more_optimal_than(low, "max") and not low.more_optimal_than(low, "min")
    assert low.more_optimal_than(newer, "min") and not newer.more_optimal_than(high, "min")
    assert newer.more_optimal_than(older, "min") and not older.more_optimal_than(newer, "max")
    with refused(UsageError):
        low.more_optimal_than(CheckpointPath("a", 0, 1, MetricData("k", 0.0)), "min")


def test_managers_prune_what_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(4):
        (tmp_path / f"epoch_0_step_{step}").mkdir()
    (tmp_path / "mine").mkdir()
    manager = CheckpointManager(str(tmp_path), keep_last_n_checkpoints=2)
    assert len(_names(tmp_path)) == 4
    manager.prune_surplus_checkpoints()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_0_step_2", "epoch_0_step_3", "mine"]
    assert "4 checkpoints found in" in caplog.text and "Deleting 2 oldest checkpoints" in caplog.text
    shutil.rmtree(tmp_path / "epoch_0_step_2")
    manager.remove_checkpoint()
    assert "Failed to remove checkpoint" in caplog.text and manager.get_last_checkpoint() == CheckpointPath(str(tmp_path), 0, 3)


# --- of echelon's promises, what holds here too


def test_a_run_from_the_beginning_does_not_mix_with_another(tmp_path: Path) -> None:
    _train(Unit(), DistributedCheckpointSaver(tmp_path))
    with refused(CheckpointError):
        _train(Unit(), DistributedCheckpointSaver(tmp_path))
    unit = Unit()
    assert DistributedCheckpointSaver.restore_from_latest(tmp_path, unit)
    train(unit, DATA, max_epochs=3, callbacks=[DistributedCheckpointSaver(tmp_path)])
    assert _names(tmp_path) == {T.format(2, 10), T.format(3, 15)}
    data = tmp_path / T.format(3, 15) / "state.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    assert DistributedCheckpointSaver.restore_from_latest(tmp_path, unit) and unit.train_progress.num_steps_completed == 10


def test_a_run_whose_steps_are_larger_now_goes_on_elsewhere(tmp_path: Path) -> None:
    unit, data = Regression(accumulate=2, module=nn.Linear(4, 2)), [(torch.ones(2, 4), torch.ones(2, 2))] * 8
    train(unit, data, max_steps=6, callbacks=[DistributedCheckpointSaver(tmp_path)])
    unit = Regression(accumulate=1, module=nn.Linear(4, 2))
    assert DistributedCheckpointSaver.restore_from_latest(tmp_path, unit) and unit.train_progress.num_steps_completed == 3
    with refused(CheckpointError):
        train(unit, data, max_steps=4, callbacks=[DistributedCheckpointSaver(tmp_path)])


def _on_two_ranks(folder: Path, strategy: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    data = [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(4)]
    unit = Regression(module=nn.Linear(4, 2), layout=strategy)
    mine = folder if dist.get_rank() == 0 else folder / "elsewhere"
    saver = DistributedCheckpointSaver(folder, save_every_n_train_steps=3, keep_last_n_checkpoints=1)
    train(unit, data, max_epochs=1, callbacks=[saver])
    found = [path.path for path in checkpoint.get_checkpoint_dirpaths(str(mine), ".metadata")]
    again = Regression(module=nn.Linear(4, 2), layout=strategy)
    assert DistributedCheckpointSaver.restore_from_latest(str(folder), again)
    return found, largest_difference(whole(again.module), whole(unit.module))


@pytest.mark.full
def test_two_ranks_save_and_agree(ranks: Ranks, tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        folder = tmp_path / strategy
        for found, difference in ranks(2, _on_two_ranks, folder, strategy):
            assert found == [str(folder / T.format(1, 4))], "the first rank's view"
            assert difference == 0


# --- what is not here


def test_what_torchtnt_wrote_is_refused_with_what_reads_it(tmp_path: Path) -> None:
    """As TorchTNT's saver calls torch; the remedy is followed."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    first, unit = Unit(), Unit()
    path = tmp_path / T.format(1, 3)
    dcp.save({"app_state": {"linear": first.linear.state_dict()}}, checkpoint_id=path, no_dist=True)
    for restore in (
        lambda: DistributedCheckpointSaver.restore(path, unit),
        lambda: DistributedCheckpointSaver.restore_from_latest(str(tmp_path), unit),
    ):
        with refused(NotHereError):
            restore()
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    unit.linear.load_state_dict(torch.load(tmp_path / "whole.pt")["app_state"]["linear"])
    assert largest_difference(whole(unit.linear), whole(first.linear)) == 0
    newer = DistributedCheckpointSaver(str(tmp_path), save_every_n_epochs=1)
    _train(unit, newer)  # beside it
    assert DistributedCheckpointSaver.restore_from_latest(str(tmp_path), Unit())


def test_a_failing_metric_is_said_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    for value in (torch.ones(2), "x"):
        saver = Saver(tmp_path, best_checkpoint_config=BestCheckpointConfig("loss"))
        _train(Unit([value]), saver)  # type: ignore[list-item]
        assert "the checkpoint has no loss: Unit's is not a single number" in caplog.text
        caplog.clear()
    _train(Unit(), Saver(tmp_path, best_checkpoint_config=BestCheckpointConfig("nothing")))
    assert "the checkpoint has no nothing" in caplog.text
    assert _names(tmp_path) == {T.format(2, 10)}
