"""Saves that the loop does not wait for: what is written is the state at that step, and what fails is told."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.checkpoint import commit, staging
from echelon.checkpoint.snapshot import Snapshot
from echelon.contracts.errors import CheckpointWriteError, UsageError
from tests.conftest import Ranks
from tests.models import largest_difference, whole
from tests.test_checkpoint import _loader, _unit

Saver = ech.DistributedCheckpointSaver


def _names(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in folder.iterdir())


def _slowly(monkeypatch: pytest.MonkeyPatch | None, released: threading.Event) -> None:
    """Writing waits until it is released: whatever the loop does meanwhile must not show in the files."""
    real = Snapshot.write

    def write(self: Any, folder: Any) -> Any:
        released.wait(30)
        return real(self, folder)

    if monkeypatch is not None:
        monkeypatch.setattr(Snapshot, "write", write)
    else:
        Snapshot.write = write  # type: ignore[method-assign]


def _train_behind(folder: Path, strategy: str) -> dict[str, Any]:
    """One save at step 3, written only when three more steps have changed everything."""
    released = threading.Event()
    _slowly(None, released)

    class Release(ech.Callback):
        def on_train_step_end(self, state: ech.State, unit: Any) -> None:
            if unit.train_progress.num_steps_completed == 6:
                released.set()

    unit = _unit(strategy, dropout=0.3)
    saver = Saver(folder, save_every_n_train_steps=3, async_checkpoint=True, on_busy="wait")
    ech.train(unit, _loader(), max_steps=6, callbacks=[Release(), saver])
    return whole(unit.module)


def _resume_from_3(folder: Path, strategy: str) -> dict[str, Any]:
    unit, loader = _unit(strategy, seed=9, dropout=0.3), _loader()
    Saver.restore(folder / "step-00000003", unit, train_dataloader=loader)
    ech.train(unit, loader, max_steps=6)
    return whole(unit.module)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_what_is_written_later_is_the_state_of_its_step(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    want = ranks(2, _train_behind, tmp_path / "c", strategy)[0]
    assert _names(tmp_path / "c") == [3, 6]
    assert largest_difference(ranks(2, _resume_from_3, tmp_path / "c", strategy)[0], want) == 0


def test_the_loop_goes_on_while_a_save_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, seen = threading.Event(), []
    _slowly(monkeypatch, released)

    class Watch(ech.Callback):
        def on_train_step_end(self, state: ech.State, unit: Any) -> None:
            seen.append((unit.train_progress.num_steps_completed, commit.latest(tmp_path)))
            if len(seen) == 5:
                released.set()

    saver = Saver(tmp_path, save_every_n_train_steps=6, async_checkpoint=True)
    early = Saver(tmp_path, save_every_n_train_steps=2, async_checkpoint=True, on_busy="skip")
    ech.train(_unit("noop"), _loader(), max_steps=5, callbacks=[early, Watch()])
    assert seen[:4] == [(1, None), (2, None), (3, None), (4, None)]  # written behind, and step 4 skipped
    assert _names(tmp_path) == [2, 5]  # the end of training waits, and is saved
    del saver


def test_a_busy_save_is_waited_for_or_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for on_busy, names in (("wait", [1, 2, 3, 4]), ("skip", [1, 4])):
        released = threading.Event()
        patch = pytest.MonkeyPatch()
        _slowly(patch, released)
        timer = threading.Timer(0.5, released.set)
        timer.start()
        saver = Saver(tmp_path / on_busy, save_every_n_train_steps=1, async_checkpoint=True, on_busy=on_busy)  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING):
            ech.train(_unit("noop"), _loader(), max_steps=4, callbacks=[saver])
        timer.join()
        patch.undo()
        assert _names(tmp_path / on_busy) == names
    assert "step 2 is not saved: the save before it is still being written" in caplog.text
    with pytest.raises(UsageError, match="'wait' or 'skip'"):
        Saver(tmp_path, on_busy="perhaps")  # type: ignore[arg-type]


def _fails_behind(folder: Path, end: int) -> tuple[str, int]:
    """A background save of rank 1 fails at once; rank 0, which waits for its part, must hear of it."""
    import torch.distributed as dist

    real = Snapshot.write

    def write(self: Any, folder: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(5, "Input/output error")
        return real(self, folder)

    Snapshot.write = write  # type: ignore[method-assign]
    saver = Saver(folder, save_every_n_train_steps=2, async_checkpoint=True, tolerated_failures=0)

    class Wait(ech.Callback):
        def on_train_step_start(self, state: ech.State, unit: Any) -> None:
            time.sleep(0.1)

    unit = _unit("ddp")
    with pytest.raises(CheckpointWriteError) as caught:
        ech.train(unit, _loader(), max_steps=end, callbacks=[Wait(), saver])
    return str(caught.value), unit.train_progress.num_steps_completed


def test_a_failure_behind_the_loop_comes_up_at_the_next_step_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for text, step in ranks(2, _fails_behind, tmp_path / "c", 12):
        assert step == 3 and "rank 1: OSError: [Errno 5] Input/output error" in text
    for text, step in ranks(2, _fails_behind, tmp_path / "d", 2):  # there is no next step: the end of training tells
        assert step == 2 and "Input/output error" in text
    assert [p.name for p in (tmp_path / "c").iterdir()] == []


class NoConnection(Exception):
    """Libraries of object stores have errors that are no OSError."""


def _fails_once(folder: Path, asynchronous: bool) -> int:
    import torch.distributed as dist

    real = Snapshot.write

    def write(self: Any, place: Any) -> Any:
        if dist.get_rank() == 1 and "00000002" in str(place):
            raise NoConnection("no connection")
        return real(self, place)

    Snapshot.write = write  # type: ignore[method-assign]
    saver = Saver(folder, save_every_n_train_steps=2, async_checkpoint=asynchronous)
    unit = _unit("ddp")
    ech.train(unit, _loader(), max_steps=6, callbacks=[saver])
    return unit.train_progress.num_steps_completed


def test_any_error_of_writing_on_one_rank_is_told_to_all_and_tolerated(ranks: Ranks, tmp_path: Path) -> None:
    for asynchronous in (False, True):
        assert ranks(2, _fails_once, tmp_path / str(asynchronous), asynchronous) == [6, 6]
        assert _names(tmp_path / str(asynchronous)) == [4, 6]


def test_an_error_of_the_run_ends_the_thread(tmp_path: Path) -> None:
    class Bad(ech.Callback):
        def on_train_step_end(self, state: ech.State, unit: Any) -> None:
            raise ValueError("bad")

    saver = Saver(tmp_path, save_every_n_train_steps=1, async_checkpoint=True)
    with pytest.raises(ValueError, match="bad"):
        ech.train(_unit("noop"), _loader(), max_steps=3, callbacks=[saver, Bad()])
    assert not [t for t in threading.enumerate() if t.name.startswith("echelon-save")]
    assert commit.latest(tmp_path) in (None, tmp_path / "step-00000001")


def test_buffers_are_used_again(tmp_path: Path) -> None:
    places: list[dict[str, int]] = []

    class Look(ech.Callback):
        def on_train_step_end(self, state: ech.State, unit: Any) -> None:
            places.append({name: buffer.data_ptr() for name, buffer in saver._buffers.items()})

    saver = Saver(tmp_path, save_every_n_train_steps=2, async_checkpoint=True)
    ech.train(_unit("noop"), _loader(), max_steps=6, callbacks=[saver, Look()])
    assert len(places[1]) > 20 and places[1] == places[3] == places[5]
    assert not saver._buffers  # given back with the run


def _copied_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    real = staging.Later.__call__

    def later(self: Any) -> None:
        time.sleep(0.3)
        real(self)

    monkeypatch.setattr(staging.Later, "__call__", later)


def test_an_optimizers_step_waits_until_its_parameters_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made beside the next forward and backward pass."""
    _copied_slowly(monkeypatch)
    saver = Saver(tmp_path, save_every_n_train_steps=3, async_checkpoint=True)
    unit = _unit("noop")
    ech.train(unit, _loader(), max_steps=4, callbacks=[saver])
    assert saver.stall_s > 0.25
    other, loader = _unit("noop", seed=9), _loader()
    Saver.restore(tmp_path / "step-00000003", other, train_dataloader=loader)
    ech.train(other, loader, max_steps=4)
    assert largest_difference(whole(unit.module), whole(other.module)) == 0
    assert not saver._waiting and not unit.optimizer._optimizer_step_pre_hooks


def test_parameters_that_something_else_changes_meanwhile_are_never_saved_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _copied_slowly(monkeypatch)

    class Meddling(ech.Callback):
        def on_train_step_start(self, state: ech.State, unit: Any) -> None:
            with torch.no_grad():
                unit.module.first.weight.mul_(1.5)

    saver = Saver(tmp_path, save_every_n_train_steps=2, async_checkpoint=True, tolerated_failures=0)
    with pytest.raises(CheckpointWriteError, match="changed by something else than an optimizer's step"):
        ech.train(_unit("noop"), _loader(), max_steps=6, callbacks=[Meddling(), saver])
    assert commit.latest(tmp_path) is None
