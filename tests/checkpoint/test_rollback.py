"""A run that diverges goes back to a checkpoint and on without the batches: as if it had been told to leave them out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import echelon as ech
from echelon.checkpoint import commit
from echelon.common.errors import CheckpointOptionError, DivergedError
from echelon.contracts.events import read_lines
from tests.conftest import Ranks
from tests.kit.models import Batch, batch, largest_difference, net, whole
from tests.kit.refusals import refused
from tests.kit.run_folders import recorded
from tests.kit.units import Own, Regression

pytestmark = pytest.mark.standing_ranks

Saver = ech.DistributedCheckpointSaver
PER_EPOCH = 36
STEPS = PER_EPOCH + 6


def _data(bad: int, value: float) -> torch.utils.data.TensorDataset:
    x, y = batch(8 * PER_EPOCH, 0)
    y[bad] = value
    return torch.utils.data.TensorDataset(x, y)


def _run(
    folder: Path | None, bad: int, value: float, *, skipped: Any = (), steps: int = STEPS, resume: bool = False, **options: Any
) -> dict[str, Any]:
    """Train with dropout and a schedule; with a folder, under a RollBack."""
    layout, accumulate = options.pop("layout", "ddp"), options.pop("accumulate", 1)
    unit = Regression(
        module=net(dropout=0.2),
        layout=layout,
        optimizer="AdamW",
        lr=0.01,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9),
        step_lr_interval="step",
        accumulate=accumulate,
    )
    loader = ech.Loader(_data(bad, value), 8, seed=1, accumulate=accumulate)
    unit.train_progress.skipped = list(skipped)
    callbacks: list[ech.Callback] = []
    if folder is not None:
        saver = Saver(folder, save_every_n_updates=4, async_checkpoint=options.pop("asynchronous", False))
        if resume:
            assert saver.restore_from_latest(folder, unit, train_dataloader=loader)
        callbacks = [ech.callbacks.RollBack(saver, **options), saver]
    ech.train(unit, loader, max_updates=steps, callbacks=callbacks)
    return {"module": whole(unit.module), "skipped": unit.train_progress.skipped, "steps": unit.steps}


def _order() -> Any:
    return ech.Loader(_data(0, 0.0), 8, seed=1, options=ech.data.LoaderOptions(dp=(0, 1))).order


def _steps_of(bad: int) -> list[int]:
    """The updates of two epochs that a sample belongs to."""
    samples = [_order().at(epoch, np.arange(8 * PER_EPOCH)).tolist() for epoch in (0, 1)]
    return [epoch * PER_EPOCH + samples[epoch].index(bad) // 8 for epoch in (0, 1)]


def _seen_after_a_while() -> int:
    """A sample that comes late enough for a history, and early in the second epoch, some steps after a checkpoint each time."""
    for i in range(8 * PER_EPOCH):
        first, second = _steps_of(i)
        if 20 <= first <= 32 and second <= PER_EPOCH + 3 and first % 4 and second % 4:
            return i
    raise AssertionError("no such sample")


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "value", "accumulation", "asynchronous"),
    [
        ("ddp", math.nan, 2, False),
        ("fsdp", math.inf, 1, True),
        ("ddp", 1e3, 1, True),
    ],
)
def test_going_back_leaves_the_batch_out_and_nothing_else(
    ranks: Ranks, tmp_path: Path, layout: str, value: float, accumulation: int, asynchronous: bool
) -> None:
    """The sample comes twice: the second time the way back leads into another epoch."""
    bad = _seen_after_a_while()
    ranges = [(k, k + 1) for k in _steps_of(bad)]
    options = {"layout": layout, "accumulate": accumulation}
    got = ranks(2, _run, tmp_path / "c", bad, value, asynchronous=asynchronous, **options)[0]
    want = ranks(2, _run, None, bad, value, skipped=ranges, **options)[0]
    assert got["skipped"] == ranges
    assert all(torch.isfinite(value).all() for value in got["module"].values())
    assert largest_difference(got["module"], want["module"]) == 0
    assert not {k * accumulation + m for k, _ in ranges for m in range(accumulation)} & set(want["steps"])


@pytest.mark.full
def test_what_was_left_out_is_left_out_after_a_resume(ranks: Ranks, tmp_path: Path) -> None:
    bad = _seen_after_a_while()
    want = ranks(2, _run, tmp_path / "a", bad, math.nan)[0]
    ranks(2, _run, tmp_path / "b", bad, math.nan, steps=_steps_of(bad)[0] + 5)
    got = ranks(2, _run, tmp_path / "b", bad, math.nan, resume=True)[0]
    assert got["skipped"] == want["skipped"] and largest_difference(got["module"], want["module"]) == 0
    assert _steps_of(bad)[0] not in got["steps"]


def _with_dataloader(folder: Path | None, skipped: Any) -> tuple[dict[str, Any], Any]:
    ech.seed(2)
    unit = Regression(module=net(dropout=0.2), optimizer="AdamW", lr=0.01)
    unit.train_progress.skipped = list(skipped)
    callbacks: list[ech.Callback] = []
    if folder is not None:
        saver = Saver(folder, save_every_n_updates=5)
        callbacks = [ech.callbacks.RollBack(saver), saver]
    loader = torch.utils.data.DataLoader(_data(5, math.nan), batch_size=8, shuffle=True)
    ech.train(unit, loader, max_updates=STEPS, callbacks=callbacks)
    return whole(unit.module), unit.train_progress.skipped


def test_a_dataloader_goes_back_in_its_own_order(tmp_path: Path) -> None:
    got, skipped = _with_dataloader(tmp_path, [])
    want, _ = _with_dataloader(None, skipped)
    assert skipped and all(torch.isfinite(value).all() for value in got.values())
    assert largest_difference(got, want) == 0


def _until_it_ends(folder: Path, watch: bool) -> str:
    x, y = batch(96, 0)
    y[5::8] = math.nan  # in nearly every batch
    unit = Regression(module=net(), layout="ddp")
    saver = Saver(folder)
    loader = ech.Loader(torch.utils.data.TensorDataset(x, y), 8, seed=1)
    # Rank 0 alone sees it, in a number of its own.
    options: dict[str, Any] = (
        {"watch": lambda state, unit: math.nan if torch.distributed.get_rank() == 0 else 0.0} if watch else {}
    )
    with pytest.raises(DivergedError) as error:
        ech.train(unit, loader, max_epochs=2, callbacks=[ech.callbacks.RollBack(saver, at_most=2, **options), saver])
    return str(error.value)


@pytest.mark.full
@pytest.mark.parametrize("watch", [False, True])
def test_it_is_bounded_and_the_error_names_step_rank_and_samples(ranks: Ranks, tmp_path: Path, watch: bool) -> None:
    first, second = ranks(2, _until_it_ends, tmp_path / "c", watch)
    assert first == second
    assert "rolled back 2 times before" in first and "(samples [" in first
    assert ("rank 0: the loss is nan" in first) and ("rank 1" in first) != watch


class Losing(Own):
    """Remembers its loss."""

    def __init__(self) -> None:
        module = net()
        super().__init__(module, torch.optim.SGD(module.parameters(), lr=0.01))
        self.loss = 0.0

    def _computed(self, data: Batch) -> torch.Tensor:
        loss = super()._computed(data)
        self.loss = float(loss.detach())
        return loss


@pytest.mark.full
def test_a_unit_of_the_users_own_says_what_to_watch_and_the_events_tell(tmp_path: Path) -> None:
    bad, roll_back = _seen_after_a_while(), ech.callbacks.RollBack
    loader, saver = ech.Loader(_data(bad, math.nan), 8, seed=1), Saver(tmp_path / "c", save_every_n_updates=4)
    for data, options in ((loader, {}), ([loader.dataset[0]], {"watch": lambda state, unit: 0.0})):
        with refused(CheckpointOptionError):
            ech.train(Losing(), data, max_updates=1, callbacks=[roll_back(saver, **options)])
    unit = Losing()
    with recorded(tmp_path / "r") as run:
        watch = roll_back(saver, watch=lambda state, unit: unit.loss)
        ech.train(unit, loader, max_updates=STEPS, callbacks=[watch, saver])
    assert all(torch.isfinite(p).all() for p in unit.module.parameters())
    back = next(each for each in read_lines(run.events(0)) if each["event"] == "rolled_back")
    step = _steps_of(bad)[0]
    assert (back["step"], back["to"], back["skipped"]) == (step + 1, step - step % 4, [step, step + 1])
    assert bad in back["samples"] and "nan" in back["why"]


def _with_evaluations(folder: Path | None, skipped: Any) -> dict[str, Any]:
    """The bad batch is update 5, one after a checkpoint and an evaluation, which decides the learning rate."""
    unit = Regression(
        module=net(dropout=0.2),
        schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
    )
    unit.train_progress.skipped = list(skipped)
    evaluated: list[int] = []
    unit.on_eval_end = lambda state: evaluated.append(unit.train_progress.num_steps_completed)  # type: ignore[method-assign]
    saver = Saver(folder, save_every_n_updates=4) if folder is not None else None
    callbacks = [ech.callbacks.RollBack(saver), saver] if saver is not None else []
    loader = ech.Loader(_data(int(_order().at(0, np.array([43]))[0]), math.nan), 8, seed=1)
    held_out = ech.Loader(_data(0, 0.0), 8, shuffle=False)
    ech.fit(unit, loader, held_out, max_updates=12, evaluate_every_n_updates=4, evaluate_every_n_epochs=None, callbacks=callbacks)
    return {"module": whole(unit.module), "evaluated": evaluated, "lr": unit.optimizer.param_groups[0]["lr"]}


@pytest.mark.full
def test_an_evaluation_that_the_older_state_was_saved_before_comes_again_at_its_step(tmp_path: Path) -> None:
    """One that is due at a step left out is made: it decides the learning rate, and one fewer would be seen."""
    want, got = _with_evaluations(None, [(5, 6)]), _with_evaluations(tmp_path / "c", [])
    assert want["evaluated"] == [4, 8, 12] and got["evaluated"] == [4, 4, 8, 12]
    assert got["lr"] == want["lr"] and largest_difference(got["module"], want["module"]) == 0
    for skipped in ([(3, 4)], [(7, 8)], [(10, 12)], [(2, 9)]):
        assert _with_evaluations(None, skipped)["evaluated"] == [4, 8, 12]


def test_a_save_that_is_due_at_a_step_left_out_comes_after_the_next(tmp_path: Path) -> None:
    unit = Regression(module=net())
    unit.train_progress.skipped = [(3, 4), (7, 9)]
    saver = Saver(tmp_path, save_every_n_updates=4)
    ech.train(unit, ech.Loader(_data(0, 0.0), 8, seed=1), max_updates=14, callbacks=[saver])
    assert [commit.step_of(path) for path in commit.committed(tmp_path)] == [5, 10, 12, 14]


def test_an_overflow_that_the_scaler_leaves_out_is_no_divergence(tmp_path: Path) -> None:
    precision = ech.layouts.Precision(torch.float16, init_scale=2.0**40)
    unit = Regression(precision=precision, module=net(dtype=torch.float32), clip_grad_norm=1.0)
    saver = Saver(tmp_path / "c")
    loader = ech.Loader(torch.utils.data.TensorDataset(*batch(320, 0, dtype=torch.float32)), 8, seed=1)
    ech.train(unit, loader, max_updates=40, callbacks=[ech.callbacks.RollBack(saver, deviations=None), saver])
    assert not unit.train_progress.skipped
    assert unit.grad_scaler is not None and unit.grad_scaler.get_scale() < 2.0**40


@pytest.mark.full
def test_a_run_that_begins_anew_goes_back_to_its_own_beginning(tmp_path: Path) -> None:
    """An earlier run in this folder left its step 0, with other weights."""

    def run(seed: int, bad: float, skipped: Any = (), folder: str = "c", **options: Any) -> Regression:
        unit = Regression(module=net(seed))
        unit.train_progress.skipped = list(skipped)
        saver = Saver(tmp_path / folder, **options)
        loader = ech.Loader(_data(int(_order().at(0, np.array([17]))[0]), bad), 8, seed=1)
        ech.train(unit, loader, max_updates=4, callbacks=[ech.callbacks.RollBack(saver), saver])
        return unit

    run(0, 0.0)
    got, want = run(7, math.nan, options=ech.callbacks.SaveOptions(restart=True)), run(7, math.nan, [(2, 3)], folder="d")
    assert got.train_progress.skipped == [(2, 3)] and largest_difference(whole(got.module), whole(want.module)) == 0
