"""Commit: what was damaged is found and named, one run per folder, and what may be removed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

import echelon as ech
from echelon.checkpoint import commit, manifest
from echelon.checkpoint.lease import Lease
from echelon.checkpoint.policy import Keep
from echelon.checkpoint.snapshot import Snapshot
from echelon.common.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointInUseError,
    CheckpointOptionError,
    CheckpointWriteError,
)
from echelon.common.machine import started_at
from tests.conftest import Ranks
from tests.kit.models import largest_difference, whole
from tests.kit.refusals import refused
from tests.kit.saving import held_by_another, make_loader, make_unit, no_locks, steps_in, train_and_save, uninterrupted
from tests.kit.units import Hooks

Saver = ech.DistributedCheckpointSaver


def _train(folder: Path | str, steps: int, unit: Any = None, **options: Any) -> Any:
    unit = unit or make_unit("none")
    ech.train(unit, make_loader(), max_updates=steps, callbacks=[Saver(folder, **options)])
    return unit


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("two")
    _train(folder, 4, save_every_n_updates=2)
    return folder


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _restored(folder: Path, **options: Any) -> int:
    unit = make_unit("none", seed=9)
    assert Saver.restore_from_latest(folder, unit, **options)
    return unit.train_progress.num_steps_completed


@pytest.mark.full
def test_a_damaged_newest_is_named_and_the_older_one_taken(two: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "c"
    shutil.copytree(two, folder)
    _flip(folder / "step-00000004" / "tensors-00000.safetensors", 80_000)
    with caplog.at_level(logging.WARNING):
        assert _restored(folder) == 2
    assert "tensors-00000.safetensors is not what was written" in caplog.text and "went on from" in caplog.text
    with refused(CheckpointCorruptError):
        _restored(folder, fall_back=False)
    # The run goes on from step 2 and saves step 4 again; the damaged one is kept for whoever wants to see it.
    unit = make_unit("none", seed=9)
    Saver.restore_from_latest(folder, unit)
    _train(folder, 6, unit, save_every_n_updates=2)
    assert largest_difference(whole(unit.module), uninterrupted("none", 6)) == 0
    assert steps_in(folder, beside=["corrupt-step-00000004"]) == [2, 4, 6]
    assert _restored(folder) == 6


def test_a_newer_format_says_so(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(two, tmp_path / "c")
    path = tmp_path / "c" / "step-00000004" / "manifest.json"
    newer = json.loads(path.read_text())
    monkeypatch.setattr(manifest, "FORMAT", 3)
    path.write_bytes(manifest.render({k: v for k, v in newer.items() if k not in ("format", "checksum")}))
    monkeypatch.setattr(manifest, "FORMAT", 2)
    with refused(CheckpointError):
        _restored(tmp_path / "c")


def _restore_damaged(folder: Path) -> tuple[str, int]:
    unit = make_unit("ddp", seed=9)
    try:
        Saver.restore_from_latest(folder, unit, fall_back=False)
    except CheckpointCorruptError as error:
        Saver.restore_from_latest(folder, unit)
        return str(error), unit.train_progress.num_steps_completed
    return "", -1


@pytest.mark.full
def test_two_ranks_share_the_reading_and_both_know_the_result(ranks: Ranks, two: Path, tmp_path: Path) -> None:
    """Whichever rank had the damaged file for its share."""
    for name in ("index.json", "state.safetensors"):
        shutil.copytree(two, tmp_path / name)
        _flip(tmp_path / name / "step-00000004" / name, 99)
        for text, step in ranks(2, _restore_damaged, tmp_path / name):
            assert f"{name} is not what was written" in text and step == 2


# --- one run per folder


def test_a_second_run_is_refused_while_the_first_lives_and_takes_over_when_it_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.checkpoint.lease._PATIENCE_S", 0.0)
    with held_by_another(tmp_path):
        (tmp_path / ".staged-step-00000009").mkdir()  # of the save that the first run is making
        with refused(CheckpointInUseError):
            _train(tmp_path, 2)
        assert (tmp_path / ".staged-step-00000009").exists()
    _train(tmp_path, 2)  # its lease is still lying there
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_without_locks_the_text_of_the_lease_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.fcntl", no_locks)
    monkeypatch.setattr("echelon.checkpoint.lease._PATIENCE_S", 0.0)
    mine, parent = Lease(tmp_path), os.getppid()
    mine.acquire()
    text = json.loads((tmp_path / ".lease").read_text())
    assert text["pid"] == os.getpid()
    mine.release()
    for held, of in (
        (True, {"pid": parent, "start": started_at(parent)}),
        (True, {"host": "elsewhere", "seen": time.time()}),
        (False, {"pid": parent, "start": "1"}),
        (False, {"host": "elsewhere", "seen": time.time() - 3600}),
        (False, {"boot": "an older one", "pid": parent}),
    ):
        (tmp_path / ".lease").write_text(json.dumps({**text, **of}))
        with pytest.raises(CheckpointInUseError) if held else contextlib.nullcontext():
            taken = Lease(tmp_path)
            taken.acquire()
            taken.release()


def test_a_run_that_ends_leaves_no_lease_whatever_ended_it(tmp_path: Path) -> None:
    bad = Hooks(on_train_step_end=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ech.train(make_unit("none"), make_loader(), max_updates=2, callbacks=[Saver(tmp_path, save_every_n_updates=1), bad])
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_restart_sets_the_older_runs_checkpoints_aside(tmp_path: Path) -> None:
    train_and_save(tmp_path, "none", 4)
    with refused(CheckpointError):
        _train(tmp_path, 2)
    _train(tmp_path, 2, options=ech.callbacks.SaveOptions(restart=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["replaced-step-00000004", "step-00000002"]


# --- what stays


def test_which_checkpoints_go() -> None:
    config = ech.callbacks.BestCheckpointConfig
    metrics = {s: {"loss": v} for s, v in {1: 5.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: 3.0}.items()}
    steps = [1, 2, 3, 4, 5]
    assert Keep().to_delete(steps, {}) == []
    assert Keep(2).to_delete(steps, {}) == [1, 2, 3]
    assert Keep(1, every_updates=2).to_delete(steps, {}) == [1, 3]
    assert Keep(2, best=config("loss")).to_delete(steps, metrics) == [1, 4]  # 2 and 3 are best, 5 is the newest
    assert Keep(1, best=config("loss", "max")).to_delete(steps, metrics) == [2, 3, 4]
    assert Keep(1).to_delete([7], {}) == []
    # A metric that is not a number leaves as many as were asked for: the newest.
    assert Keep(3, best=config("loss")).to_delete(steps, {}) == [1, 2]
    assert Keep(3, best=config("loss")).to_delete(steps, {2: {"loss": 1.0}}) == [1, 3]
    with refused(CheckpointOptionError):
        config("loss", "least")  # type: ignore[arg-type]


def test_the_best_stays_and_can_be_restored(tmp_path: Path) -> None:
    def scored(state: ech.State, unit: Any) -> None:
        unit.score = float([5, 1, 9, 0, 2, float("nan")][unit.train_progress.num_steps_completed])

    best = ech.callbacks.BestCheckpointConfig("score", "max")
    saver = Saver(tmp_path, save_every_n_updates=1, keep_last_n_checkpoints=2, best_checkpoint_config=best)
    ech.train(make_unit("none"), make_loader(), max_updates=6, callbacks=[Hooks(on_train_step_start=scored), saver])
    assert steps_in(tmp_path) == [1, 3, 6]
    unit = make_unit("none")
    assert Saver.restore_from_best(tmp_path, unit, "score", "max")
    assert unit.train_progress.num_steps_completed == 3
    assert not Saver.restore_from_best(tmp_path, unit, "other")


def test_nothing_is_removed_before_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _train(tmp_path, 2)
    unit = make_unit("none")
    Saver.restore_from_latest(tmp_path, unit)
    monkeypatch.setattr(commit, "commit", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with refused(CheckpointWriteError):
        _train(tmp_path, 4, unit, save_every_n_updates=1, keep_last_n_checkpoints=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]
    commit.verify(tmp_path / "step-00000002")


class NoConnection(Exception):
    """Libraries of object stores have errors that are no OSError."""


ERRORS = {"full": OSError(28, "No space left on device"), "away": NoConnection("no connection")}


def _fails_on(rank: int, folder: Path, error: str, **options: Any) -> tuple[str, int, int]:
    """Two saves fail on one rank in the middle of training, the later ones do not."""
    real, failed = Snapshot.write, []

    def write(self: Any, folder: Any) -> Any:
        if self.rank == rank and len(failed) < 2:
            failed.append(1)
            raise ERRORS[error]
        return real(self, folder)

    unit, text = make_unit("ddp"), ""
    saver = Saver(folder, save_every_n_updates=1, **options)
    with mock.patch.object(Snapshot, "write", write):
        try:
            ech.train(unit, make_loader(), max_updates=6, callbacks=[saver])
        except CheckpointWriteError as told:
            text = str(told)
    return text, unit.train_progress.num_steps_completed, saver.failures


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("error", "said"), [("full", "OSError: [Errno 28] No space left on device"), ("away", "NoConnection: no")]
)
def test_an_error_of_writing_on_one_rank_is_told_to_all_and_training_goes_on(
    ranks: Ranks, tmp_path: Path, asynchronous: bool, error: str, said: str
) -> None:
    options: dict[str, Any] = {"async_checkpoint": asynchronous}
    assert ranks(2, _fails_on, 1, tmp_path / "c", error, **options) == [("", 6, 0)] * 2
    assert steps_in(tmp_path / "c") == [3, 4, 5, 6]
    options["options"] = ech.callbacks.SaveOptions(tolerated_failures=0)
    for text, step, failures in ranks(2, _fails_on, 1, tmp_path / "d", error, **options):
        assert f"rank 1: {said}" in text and "GB free" in text
        assert failures == 1 and step <= 3
    assert commit.latest(tmp_path / "d") is None


def _in_a_folder_of_its_own(above: Path) -> str:
    (here := above / os.environ["RANK"]).mkdir()
    os.chdir(here)
    saver = Saver("c", save_every_n_updates=1, options=ech.callbacks.SaveOptions(tolerated_failures=0))
    try:
        ech.train(make_unit("ddp"), make_loader(), max_updates=1, callbacks=[saver])
    except CheckpointWriteError as told:
        return str(told)
    return ""


def test_ranks_whose_folders_are_different_ones_are_told_so(ranks: Ranks, tmp_path: Path) -> None:
    """As on machines that share no storage: all give the same words, and each means another folder."""
    first, second = ranks(2, _in_a_folder_of_its_own, tmp_path)
    assert first == second and "rank 1: " in first
    assert "1/c must be the same folder for all ranks" in first and "storage that all machines share" in first


@pytest.mark.full
def test_ranks_divide_what_all_of_them_have(ranks: Ranks, tmp_path: Path) -> None:
    """Under ddp every tensor is on both ranks: one of them writes it, and both write about as much."""
    ranks(2, train_and_save, tmp_path / "c", "ddp", 2)
    facts = manifest.read(tmp_path / "c" / "step-00000002")
    first, second = (facts["files"][f"tensors-{rank:05d}.safetensors"]["size"] for rank in range(2))
    assert abs(first - second) < 0.2 * (first + second)
    index = json.loads((tmp_path / "c" / "step-00000002" / "index.json").read_text())
    assert all(len(entry["pieces"]) == 1 for entry in index.values())
    names = [set(load_file(tmp_path / "c" / "step-00000002" / f"tensors-{rank:05d}.safetensors")) for rank in range(2)]
    assert not names[0] & names[1] and names[0] | names[1] == set(index)
