"""Saves that the loop does not wait for: what is written is the state at that step, and what fails is told."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.checkpoint import commit, tensorfile
from echelon.checkpoint.buffers import Buffers
from echelon.checkpoint.snapshot import Snapshot
from echelon.common.errors import CheckpointError, CheckpointOptionError, CheckpointWriteError
from echelon.contracts.events import read_lines
from tests.conftest import Ranks
from tests.kit.models import largest_difference, whole
from tests.kit.refusals import refused
from tests.kit.run_folders import recorded
from tests.kit.saving import make_loader, make_unit, steps_in
from tests.kit.started import wait_until
from tests.kit.units import Hooks

Saver = ech.DistributedCheckpointSaver


def _slowly(monkeypatch: pytest.MonkeyPatch | None, released: threading.Event) -> None:
    """Writing waits until it is released: whatever the loop does meanwhile must not show in the files."""
    real = Snapshot.write

    def write(self: Any, folder: Any) -> Any:
        released.wait(300)
        return real(self, folder)

    if monkeypatch is not None:
        monkeypatch.setattr(Snapshot, "write", write)
    else:
        Snapshot.write = write  # type: ignore[method-assign]


def _train_behind(folder: Path, layout: str) -> dict[str, Any]:
    """One save at step 3, written only when three more steps have changed everything."""
    released = threading.Event()
    _slowly(None, released)

    def release(state: ech.State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == 6:
            released.set()

    unit = make_unit(layout, dropout=0.3)
    saver = Saver(folder, save_every_n_updates=3, async_checkpoint=True)
    ech.train(unit, make_loader(), max_updates=6, callbacks=[Hooks(on_train_step_end=release), saver])
    return whole(unit.module)


def _resume_from_3(folder: Path, layout: str) -> dict[str, Any]:
    unit, loader = make_unit(layout, seed=9, dropout=0.3), make_loader()
    Saver.restore(folder / "step-00000003", unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=6)
    return whole(unit.module)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "zero1"])
def test_what_is_written_later_is_the_state_of_its_step(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    want = ranks(2, _train_behind, tmp_path / "c", layout)[0]
    assert steps_in(tmp_path / "c") == [3, 6]
    assert largest_difference(ranks(2, _resume_from_3, tmp_path / "c", layout)[0], want) == 0


def test_the_loop_goes_on_while_a_save_is_written_and_a_busy_one_is_waited_for_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for on_busy, after, names in (("wait", 1, [1, 2, 3, 4]), ("skip", 3, [1, 4])):
        folder, released, there = tmp_path / on_busy, threading.Event(), []
        timer = threading.Timer(0.2, released.set)

        def step_ended(state: ech.State, unit: Any, after: int = after, timer: Any = timer, there: Any = there) -> None:
            there.append(commit.latest(folder))  # noqa: B023
            if unit.train_progress.num_steps_completed == after:
                timer.start()

        options = ech.callbacks.SaveOptions(on_busy=on_busy)  # type: ignore[arg-type]
        saver = Saver(folder, save_every_n_updates=1, async_checkpoint=True, options=options)
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
            _slowly(patch, released)
            ech.train(make_unit("none"), make_loader(), max_updates=4, callbacks=[Hooks(on_train_step_end=step_ended), saver])
        timer.join()
        assert steps_in(folder) == names and (on_busy == "wait" or there[:3] == [None] * 3)
    assert "update 2 is not saved: the save before it is still being written" in caplog.text
    with refused(CheckpointOptionError):
        ech.callbacks.SaveOptions(on_busy="perhaps")  # type: ignore[arg-type]


def _fails_behind(folder: Path, end: int) -> tuple[str, int]:
    """A background save of rank 1 fails at once; rank 0, which waits for its part, must hear of it."""
    real = Snapshot.write

    def write(self: Any, folder: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(5, "Input/output error")
        return real(self, folder)

    Snapshot.write = write  # type: ignore[method-assign]
    saver = Saver(folder, save_every_n_updates=2, async_checkpoint=True, options=ech.callbacks.SaveOptions(tolerated_failures=0))

    def wait(*_: Any) -> None:
        """The rank that fails has failed before its next step."""
        for thread in threading.enumerate():
            if dist.get_rank() == 1 and thread.name.startswith("echelon-save"):
                thread.join(60)

    unit = make_unit("ddp")
    with pytest.raises(CheckpointWriteError) as caught:
        ech.train(unit, make_loader(), max_updates=end, callbacks=[Hooks(on_train_step_start=wait), saver])
    return str(caught.value), unit.train_progress.num_steps_completed


@pytest.mark.full
def test_a_failure_behind_the_loop_comes_up_at_the_next_step_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for text, step in ranks(2, _fails_behind, tmp_path / "c", 12):
        assert step == 3 and "rank 1: OSError: [Errno 5] Input/output error" in text
    for text, step in ranks(2, _fails_behind, tmp_path / "d", 2):  # there is no next step: the end of training tells
        assert step == 2 and "Input/output error" in text
    assert list((tmp_path / "c").iterdir()) == []


def test_an_error_of_the_run_ends_the_thread(tmp_path: Path) -> None:
    saver, bad = Saver(tmp_path, save_every_n_updates=1, async_checkpoint=True), Hooks(on_train_step_end=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ech.train(make_unit("none"), make_loader(), max_updates=3, callbacks=[saver, bad])
    assert not [t for t in threading.enumerate() if t.name.startswith("echelon-save")]
    assert commit.latest(tmp_path) in (None, tmp_path / "step-00000001")


def test_a_save_that_an_error_finds_committed_is_told(tmp_path: Path) -> None:
    def fails(*_: Any) -> None:
        wait_until(lambda: commit.latest(tmp_path / "c"), "the save is committed")
        raise ValueError("now")

    saver = Saver(tmp_path / "c", save_every_n_updates=1, async_checkpoint=True)
    with recorded(tmp_path / "r") as run, pytest.raises(ValueError, match="now"):
        ech.train(make_unit("none"), make_loader(), max_updates=3, callbacks=[saver, Hooks(on_train_step_end=fails)])
    (saved,) = [each for each in read_lines(run.events(0)) if each["event"] == "checkpoint_saved"]
    assert saved["step"] == 1 and saved["path"].endswith("step-00000001")


def test_pieces_hold_every_kind_of_tensor_without_overlap() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.uint8, torch.int64]
    tensors = {
        f"{i}": torch.empty(shape, dtype=kind) for i, kind in enumerate(kinds * 3) for shape in [(i, 3), (), (0,)][i % 3 :][:1]
    }
    buffers = Buffers()
    views = buffers.of(tensors)
    ends = sorted((v.data_ptr(), v.data_ptr() + v.nbytes) for v in views.values() if v.nbytes)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert {k: (v.shape, v.dtype) for k, v in views.items()} == {k: (t.shape, t.dtype) for k, t in tensors.items()}
    changed = buffers.of({**tensors, "0": torch.empty(7)})
    assert changed["0"].shape == (7,) and changed["1"].data_ptr() == views["1"].data_ptr()


def _begin_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a save gets its first turn when the program has long gone on, as it may on a loaded machine."""
    real = threading.Thread.run

    def run(self: threading.Thread) -> None:
        if self.name.startswith("echelon-save"):
            time.sleep(0.2)
        real(self)

    monkeypatch.setattr(threading.Thread, "run", run)


class Bag:
    """A user's own state, which hands out what lives: containers, an array, a tensor."""

    def __init__(self) -> None:
        self.seen, self.counts, self.array, self.tensor = [1], {"a": [1]}, np.ones(3), torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "counts": self.counts, "array": self.array, "tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.counts, self.array, self.tensor = (state[k] for k in ("seen", "counts", "array", "tensor"))

    def change(self) -> None:
        self.seen.append(2)
        self.counts["a"].append(2)
        self.counts["b"] = [3]
        self.array[:] = 7
        self.tensor.data.fill_(7)


def _kept(unit: Any) -> dict[str, Any]:
    """A copy of all that a checkpoint of the unit holds."""
    optimizer = unit.optimizer.state_dict()["state"]
    moments = {f"{i}.{k}": v for i, each in optimizer.items() for k, v in each.items() if isinstance(v, torch.Tensor)}
    bag = {"array": torch.from_numpy(unit.bag.array), "tensor": unit.bag.tensor, "frozen": unit.frozen.weight.detach()}
    plain = {"seen": list(unit.bag.seen), "counts": {k: list(v) for k, v in unit.bag.counts.items()}}
    return {k: v.clone() for k, v in {**unit.module.state_dict(), **moments, **bag}.items()} | plain


def _with_a_bag(seed: int) -> Any:
    unit = make_unit("none", seed=seed)
    unit.bag, unit.frozen = Bag(), torch.nn.Linear(2, 2).double().requires_grad_(False)
    unit.module.register_buffer("running", torch.zeros(2))
    return unit


def _of_each(act: Any) -> Any:
    return lambda unit: [act(parameter) for parameter in unit.module.parameters()]


def _everything_else(unit: Any) -> None:
    unit.bag.change()
    unit.module.running.data.fill_(3.0)
    unit.frozen.weight.data.fill_(3.0)


CHANGES: dict[str, Any] = {
    "through data": _of_each(lambda p: p.data.mul_(1.5)),
    "through numpy": _of_each(lambda p: p.detach().numpy().__iadd__(1.0)),
    "one element": lambda unit: unit.module.first.weight.detach().numpy().flat.__setitem__(3, 5.0),
    "moments": lambda unit: [state["exp_avg"].data.zero_() for state in unit.optimizer.state.values()],
    "exchanged": _of_each(lambda p: setattr(p, "data", torch.zeros_like(p))),
    "everything else": _everything_else,
}


@pytest.mark.full
@pytest.mark.parametrize("when", ["on_train_step_end", "on_train_get_next_batch_end", "on_train_step_start", "forward"])
def test_what_the_program_changes_once_a_save_was_called_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """By ways that torch counts and by those that it does not, in any hook, and in the next forward pass."""
    _begin_late(monkeypatch)
    for name, change in CHANGES.items():
        unit, kept = _with_a_bag(0), dict[str, Any]()

        def meddle(*_: Any, unit: Any = unit, kept: Any = kept, change: Any = change) -> None:
            if kept and not kept.get("changed"):
                kept["changed"] = True
                change(unit)

        def note(state: ech.State, unit: Any, kept: Any = kept) -> None:
            if unit.train_progress.num_steps_completed == 2:
                kept |= _kept(unit)

        if when == "forward":
            unit.module.register_forward_pre_hook(meddle)
        meddling = Hooks(**({} if when == "forward" else {when: meddle}))
        folder = tmp_path / name
        saver = Saver(folder, save_every_n_updates=2, async_checkpoint=True)
        ech.train(unit, make_loader(), max_updates=3, callbacks=[Hooks(on_train_step_end=note), saver, meddling])
        assert kept.pop("changed")
        other = _with_a_bag(9)
        Saver.restore(folder / "step-00000002", other)
        saved = _kept(other)
        differ = [k for k, v in kept.items() if not (torch.equal(v, saved[k]) if isinstance(v, torch.Tensor) else v == saved[k])]
        assert not differ, (name, differ)


class _Restless:
    """Stands for a thread that averages weights: changes a tensor in place while others are copied, the first few times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: torch.Tensor, times: int) -> None:
        self.left = times
        real = torch.Tensor.copy_

        def copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            done = real(to, source, non_blocking)
            if self.left and source.data_ptr() == target.data_ptr() and to.data_ptr() != target.data_ptr():
                self.left -= 1
                target.add_(1.0)
            return done

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)


def test_a_change_by_another_thread_meanwhile_is_noticed_and_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Notices if torch gives its count of changes, `_version`, another name."""
    unit = _with_a_bag(0)
    thread = _Restless(monkeypatch, unit.frozen.weight, times=2)
    ech.train(unit, make_loader(), max_updates=3, callbacks=[Saver(tmp_path, save_every_n_updates=2, async_checkpoint=True)])
    assert thread.left == 0 and "another thread changed the state" in caplog.text
    other = _with_a_bag(9)
    Saver.restore(tmp_path / "step-00000002", other)
    assert torch.equal(other.frozen.weight, unit.frozen.weight)


def test_a_state_that_another_thread_never_lets_rest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = _with_a_bag(0)
    _Restless(monkeypatch, unit.frozen.weight, times=1000)
    saver = Saver(
        tmp_path, save_every_n_updates=2, async_checkpoint=True, options=ech.callbacks.SaveOptions(tolerated_failures=0)
    )
    with refused(CheckpointWriteError):
        ech.train(unit, make_loader(), max_updates=6, callbacks=[saver])
    assert commit.latest(tmp_path) is None


def test_a_synchronous_save_that_another_thread_changed_meanwhile_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, left = _with_a_bag(0), [1]
    real = tensorfile.as_bytes

    def as_bytes(tensor: torch.Tensor) -> memoryview:
        data = bytearray(real(tensor))
        if left and tensor.data_ptr() == unit.frozen.weight.data_ptr():
            left.clear()
            unit.frozen.weight.fill_(3.0)
        return memoryview(data)

    monkeypatch.setattr(tensorfile, "as_bytes", as_bytes)
    Saver(tmp_path).save(ech.State(entry_point=ech.units.EntryPoint.TRAIN), unit)
    other = _with_a_bag(9)
    Saver.restore(tmp_path / "step-00000000", other)
    assert not left and torch.equal(other.frozen.weight, unit.frozen.weight)


def test_tensors_of_inference_mode_are_saved(tmp_path: Path) -> None:
    """They have no count of changes."""
    unit = _with_a_bag(0)
    with torch.inference_mode():
        unit.bag.tensor = torch.full((3,), 4.0)
    ech.train(unit, make_loader(), max_updates=3, callbacks=[Saver(tmp_path, save_every_n_updates=2, async_checkpoint=True)])
    other = _with_a_bag(9)
    Saver.restore(tmp_path / "step-00000002", other)
    assert other.bag.tensor.tolist() == [4.0] * 3


def _fails_to_say(folder: Path) -> None:
    class Own(Bag):
        def state_dict(self) -> dict[str, Any]:
            if dist.get_rank() == 1:
                raise LookupError("lost it")
            return {}

    unit: Any = make_unit("ddp")
    unit.own = Own()
    with refused(CheckpointError):
        ech.train(unit, make_loader(), max_updates=3, callbacks=[Saver(folder, save_every_n_updates=2, async_checkpoint=True)])


@pytest.mark.full
def test_a_state_dict_that_fails_on_one_rank_is_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _fails_to_say, tmp_path / "c")
