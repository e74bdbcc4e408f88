"""Losses that stay inf or nan end the run: at the same update on all ranks, with the batches to look at; a few do not."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.common.errors import LoopError, NonFiniteError
from echelon.loop.auto import finite
from echelon.loop.auto.finite import FiniteWatch
from tests.conftest import Ranks
from tests.kit.models import Batch, batch, net
from tests.kit.own_loops import told
from tests.kit.refusals import refused
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

NAN = math.nan


class Bad(Regression):
    """Its loss is `value` at some steps, on one rank or all; the gradients stay finite, so that it recovers."""

    def __init__(self, steps: Any, value: float = NAN, only: int | None = None, **options: Any) -> None:
        super().__init__(lr=0.01, **options)
        self.bad, self.value, self.only = set(steps), value, only

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, out = super().compute_loss(state, data)
        here = self.only is None or (torch.distributed.is_initialized() and torch.distributed.get_rank() == self.only)
        if self.train_progress.num_steps_completed in self.bad and here and self.module.training:
            loss = loss + torch.tensor(self.value, dtype=loss.dtype)
        return loss, out


def _ended(unit: Bad, per_epoch: int = 8, **limits: Any) -> tuple[int, str]:
    try:
        ech.train(unit, [batch(2, i) for i in range(per_epoch)], **limits)
    except NonFiniteError as error:
        return unit.train_progress.num_steps_completed, str(error)
    return unit.train_progress.num_steps_completed, ""


def test_ten_in_a_row_end_the_run_and_name_the_first() -> None:
    steps, said = _ended(Bad(range(11, 100)), max_updates=50)
    assert steps == 21  # the eleventh is not begun
    assert "not finite in 10 updates in a row, the first of them update 11 (batch 3 of epoch 1, counted from 0)" in said
    assert (
        "(nan)" in said
        and "Checkpoints up to step-00000011 are from before" in said
        and "stop_after_nonfinite_losses=None" in said
    )


def test_a_row_that_ends_in_time_and_one_that_is_accepted_do_not_and_who_mends_the_weights_goes_on() -> None:
    assert _ended(Bad([*range(3, 12), *range(13, 22)], math.inf), max_updates=30) == (30, "")
    assert _ended(Bad(range(3, 100), stop_after_nonfinite_losses=None), max_updates=30) == (30, "")
    steps, said = _ended(Bad(range(3, 100), -math.inf, stop_after_nonfinite_losses=2), max_updates=30)
    assert steps == 5 and "2 updates in a row" in said and "(-inf)" in said
    steps, said = _ended(Bad([13, 17], accumulate=4, stop_after_nonfinite_losses=2), max_epochs=4)
    assert steps == 20 and "update 3 (batches 4 to 7 of epoch 1, counted from 0)" in said
    unit = Bad(range(3, 13))
    assert _ended(unit, max_updates=30)[0] == 13
    assert _ended(unit, max_updates=30) == (30, "")


def test_a_run_without_one_finite_loss_is_an_error_however_short_and_a_bad_end_is_told(caplog: Any, tmp_path: Path) -> None:
    saver = ech.DistributedCheckpointSaver(tmp_path)
    steps, said = _ended(Bad(range(100)), max_updates=3, callbacks=[saver])
    assert steps == 3 and "in 3 updates in a row, the first of them update 0" in said
    assert not list(tmp_path.glob("step-*"))  # nothing to go on from
    assert _ended(Bad([6, 7]), max_updates=8) == (8, "")
    (record,) = [r for r in caplog.records if "was not finite in the last" in r.getMessage()]
    assert record.levelno == logging.WARNING and "the last 2 updates of training, from update 6" in record.getMessage()


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "10"])
def test_a_number_of_losses_that_makes_no_sense_is_refused(value: Any) -> None:
    with refused(LoopError):
        Regression(stop_after_nonfinite_losses=value)


class _Late(FiniteWatch):
    """Reads as on a GPU."""

    def take(self, loss: Any, own: torch.Tensor, micro_batches: int, progress: Any) -> None:
        super().take(torch.as_tensor(loss, dtype=torch.float64), own, micro_batches, progress)


def _on_ranks(layout: str, late: bool) -> tuple[int, str]:
    unit = Bad(range(11, 100), only=1, layout=layout)
    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(finite, "_is_elsewhere", lambda loss: True)
            unit._update.finite = _Late(10)
        return _ended(unit, max_updates=80)


@pytest.mark.full(but=("late",))
@pytest.mark.parametrize(
    ("layout", "late", "end"),
    [("ddp", False, 21), ("fsdp", False, 21), pytest.param("ddp", True, 48, id="late")],
)
def test_all_ranks_end_at_the_same_update_and_know_whose_loss_it_was(ranks: Ranks, layout: str, late: bool, end: int) -> None:
    """Read late, 16 updates are copied together, and read when 16 more are done: 11 to 20 are in the first and the second."""
    ended = ranks(2, _on_ranks, layout, late)
    assert ended[0] == ended[1]
    steps, said = ended[0]
    assert steps == end and "first of them update 11" in said and "(rank 1: nan)" in said


def _warned_on_ranks() -> list[str]:
    with told(finite.logger.name) as texts:
        assert _ended(Bad([6, 7], only=1, layout="ddp"), max_updates=8) == (8, "")
    return texts


def test_a_bad_end_names_the_rank_whose_loss_it_was(ranks: Ranks) -> None:
    (warned,), others = ranks(2, _warned_on_ranks)
    assert "in the last 2 updates of training, from update 6" in warned and "(rank 1: nan)" in warned and others == []


def test_the_end_of_training_reads_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "_is_elsewhere", lambda loss: True)
    for steps, first in ((25, 5), (40, 25)):
        unit = Bad(range(first, 100))
        unit._update.finite = _Late(10)
        ended, said = _ended(unit, max_updates=steps)
        assert ended == steps and f"first of them update {first}" in said


def test_roll_back_comes_first(tmp_path: Path) -> None:
    class Once(Bad):
        def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            made = super().compute_loss(state, data)
            self.bad.discard(self.train_progress.num_steps_completed)
            return made

    unit = Once([9, 14], stop_after_nonfinite_losses=1)
    saver = ech.DistributedCheckpointSaver(tmp_path, save_every_n_updates=4)
    data = torch.utils.data.TensorDataset(*batch(64, 0))
    ech.train(
        unit, ech.Loader(data, 4, seed=1), max_updates=30, callbacks=[ech.callbacks.RollBack(saver, deviations=None), saver]
    )
    assert unit.train_progress.skipped == [(9, 10), (14, 15)] and unit.train_progress.num_steps_completed == 30


class Steep(Regression):
    """A finite loss whose gradient is not: the slope of a root at zero."""

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.module(data[0])
        return (out * 0).sum().sqrt(), out


def _half(unit_type: type[Regression], **scaler: Any) -> Regression:
    return unit_type(precision=ech.layouts.Precision(torch.float16, **scaler), module=net(dtype=torch.float32))


def test_gradients_that_no_scale_makes_finite_end_the_run() -> None:
    unit, data = _half(Steep), [batch(8, i, torch.float32) for i in range(8)]
    with refused(NonFiniteError):
        ech.train(unit, data, max_updates=100)
    assert unit.train_progress.num_steps_completed == 33


def test_a_scale_that_begins_far_too_high_is_let_come_down() -> None:
    unit, data = _half(Regression, init_scale=2.0**60), [batch(8, i, torch.float32) for i in range(8)]
    ech.train(unit, data, max_updates=80)
    assert unit.grad_scaler is not None and unit.grad_scaler.get_scale() < 2.0**40
