"""Losses that stay inf or nan end the run: at the same update on all ranks, with the batches to look at; empty ones do not."""

from __future__ import annotations

import contextlib
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

import echelon as ech
from echelon.common.errors import LoopError, NonFiniteError
from echelon.loop.auto import finite
from echelon.loop.auto.finite import FiniteWatch
from tests.conftest import Ranks
from tests.kit.models import Batch, batch, largest_difference, net, whole
from tests.kit.own_loops import own_loop, told
from tests.kit.refusals import refused
from tests.kit.units import Hooks, Masked, Regression

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


# --- a global batch that weighs nothing trains nothing, and the run goes on: all labels left out, or all samples filtered


# Rows that count, by update; rank 1 has them in another order.
CHOSEN = [[0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
EPOCHS, LR = 2, 0.1


def _rows() -> list[Any]:
    """Of all updates, eight each."""
    made = []
    for i, chosen in enumerate(CHOSEN):
        made += list(zip(*batch(8, i), torch.tensor([*chosen, *chosen[::-1]], dtype=torch.float64), strict=True))
    return made


def _loader(**options: Any) -> ech.Loader:
    return ech.Loader(_rows(), 8, shuffle=False, **options)


def _halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def _plain() -> dict[str, torch.Tensor]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    schedule = _halved(optimizer)
    for _ in range(EPOCHS):
        for x, y, chosen in _loader(options=ech.data.LoaderOptions(dp=(0, 1))):
            if chosen.any():
                optimizer.zero_grad()
                (((module(x) - y).square().mean(1) * chosen).sum() / chosen.sum()).backward()
                optimizer.step()
                schedule.step()
    return {n: p.detach() for n, p in module.named_parameters()}


class Halving(Masked):
    def __init__(self, **options: Any) -> None:
        super().__init__(lr=LR, step_lr_interval="step", schedule=_halved, **options)


def _dying(at: int | None) -> Any:
    def step_ended(state: ech.State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == at:
            raise KeyError("died")

    return step_ended


def _trained(layout: str, accumulation: int, folder: str) -> tuple[dict[str, torch.Tensor], float, int]:
    for at in (3 * accumulation, None):  # dies behind an update without weight, and before another
        unit = Halving(layout=layout, accumulate=accumulation, clip_grad_norm=1e9)
        loader = _loader(accumulate=accumulation)
        saver = ech.DistributedCheckpointSaver(f"{folder}/{layout}", save_every_n_updates=1)
        saver.restore_from_latest(f"{folder}/{layout}", unit, train_dataloader=loader)
        with contextlib.suppress(KeyError):
            ech.train(unit, loader, max_epochs=EPOCHS, callbacks=[saver, Hooks(on_train_step_end=_dying(at))])
    return whole(unit.module), unit.optimizer.param_groups[0]["lr"], unit.window.updates


@pytest.mark.full
@pytest.mark.parametrize(("layout", "accumulation"), [("ddp", 1), ("fsdp", 2), ("zero1", 1)])
def test_the_run_goes_on_and_resumes(ranks: Ranks, tmp_path: Path, layout: str, accumulation: int) -> None:
    want = _plain()
    for ours, lr, updates in ranks(2, _trained, layout, accumulation, str(tmp_path)):
        assert largest_difference(ours, want) < 1e-12
        assert lr == pytest.approx(LR * 0.5**4) and updates == EPOCHS * len(CHOSEN)


def _own(layout: str) -> tuple[dict[str, torch.Tensor], float, list[float]]:
    module = net()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    schedule: Any = _halved(optimizer)
    model, optimizer, schedule, loader = ech.prepare(module, optimizer, schedule, _loader(), layout=layout)
    losses = []
    for _ in ech.epochs(loader, EPOCHS):
        for x, y, chosen in loader:
            with ech.window(model, weight=chosen.sum()) as window:
                optimizer.zero_grad()
                window.backward(((model(x) - y).square().mean(1) * chosen).sum() / chosen.sum())
                window.clip_grad_norm_(1e9)
                optimizer.step()
                schedule.step()
            losses.append(float(window.loss))
    return whole(model), optimizer.param_groups[0]["lr"], losses


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_loop_of_ones_own_goes_on(ranks: Ranks, layout: str) -> None:
    want = _plain()
    for ours, lr, losses in ranks(2, _own, layout):
        assert largest_difference(ours, want) < 1e-12 and lr == pytest.approx(LR * 0.5**4)
        assert [loss == 0 for loss in losses] == [not any(chosen) for chosen in CHOSEN] * EPOCHS


def _pipeline() -> dict[str, torch.Tensor]:
    unit = Halving(layout="pp=2", accumulate=2)
    ech.train(unit, _loader(accumulate=2), max_epochs=EPOCHS)
    held = {n for n, p in unit.module.named_parameters() if p.numel()}
    return {n: p for n, p in whole(unit.module).items() if n in held}


@pytest.mark.full
def test_a_pipeline_goes_on(ranks: Ranks) -> None:
    want = _plain()
    ours = {name: value for found in ranks(2, _pipeline) for name, value in found.items()}
    assert largest_difference(ours, want) < 1e-12


def test_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    unit = Halving()
    with caplog.at_level(logging.WARNING):
        ech.train(unit, _loader(), max_epochs=EPOCHS)
    told = [record.getMessage() for record in caplog.records if "was skipped" in record.getMessage()]
    assert len(told) == 4 and "update 0" in told[0] and "8 of 12" in told[-1]
    assert largest_difference(whole(unit.module), _plain()) < 1e-12


def _nothing(batches: int) -> int:
    unit = Halving(layout="ddp")
    data = [(*batch(4, i), torch.zeros(4, dtype=torch.float64)) for i in range(batches)]
    with refused(LoopError):
        ech.train(unit, data, max_epochs=1)
    return unit.window.updates


@pytest.mark.parametrize(("batches", "updates"), [(50, 10), (1, 1)])
def test_a_run_in_which_nothing_ever_weighs_anything_is_an_error(ranks: Ranks, batches: int, updates: int) -> None:
    assert ranks(2, _nothing, batches) == [updates] * 2


# --- a batch that only stands in, on a rank without samples: nothing of it counts, in batch norm or in metrics


SAMPLES, BATCH, TIMES = 9, 8, 3  # the last global batch has one sample, and rank 1 none


def _nine() -> list[Any]:
    return list(zip(*batch(SAMPLES, 0), strict=True))


class Columns(nn.Module):
    """Several values of a channel in each row, so that one row is enough for batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(1, 3).double()
        self.norm = nn.BatchNorm1d(3).double()
        self.last = nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 4) -> (B, 1)
        h = self.norm(self.first(x[..., None]).transpose(1, 2))
        return self.last(torch.tanh(h).mean(2))


class Unit(Regression):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"module": Columns(), **options})
        self.metric = torchmetrics.MeanMetric()

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        self.metric.update(torch.ones(len(data[0])), torch.ones(len(data[0])))
        return super().compute_loss(state, data)

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.1), None


def _values(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.detach().double().clone() for name, value in found.items()}


def _plain_norm() -> dict[str, torch.Tensor]:
    module = Columns()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = batch(SAMPLES, 0)
    for _ in range(TIMES):
        for at in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x[at : at + BATCH]), y[at : at + BATCH]).backward()
            optimizer.step()
    return _values(module)


def _synchronised(recompute: bool) -> tuple[dict[str, torch.Tensor], float, int]:
    options: dict[str, Any] = {}
    if recompute:
        options["activation_checkpoint_params"] = ech.layouts.ActivationCheckpointParams(
            check_fn=lambda m: isinstance(m, nn.Linear)
        )
    unit = Unit(layout=ech.DDPStrategy(sync_batchnorm=True), **options)
    ech.train(unit, ech.Loader(_nine(), BATCH, shuffle=False), max_epochs=TIMES)
    return _values(unit.prepared.unwrapped), float(unit.metric.weight), int(unit.metric.update_count)


@pytest.mark.full
@pytest.mark.parametrize("recompute", [False, True])
def test_synchronised_batch_norm_does_not_take_it_in(ranks: Ranks, recompute: bool) -> None:
    want = _plain_norm()
    found = ranks(2, _synchronised, recompute)
    for ours, _, _ in found:
        for name, value in want.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-12, msg=name)
    assert [weight for _, weight, _ in found] == [TIMES * 5, TIMES * 4]
    assert [count for *_, count in found] == [TIMES * 2, TIMES]


def _own_loop() -> dict[str, torch.Tensor]:
    module, loader = Columns(), ech.Loader(_nine(), BATCH, shuffle=False)
    own_loop(module, loader, epochs=TIMES, layout=ech.DDPStrategy(sync_batchnorm=True))
    return _values(module)


def test_nor_does_it_in_a_loop_of_ones_own(ranks: Ranks) -> None:
    want = _plain_norm()
    for ours in ranks(2, _own_loop):
        for name, value in want.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-12, msg=name)


def _metric_in_a_module() -> tuple[float, list[str]]:
    class Counts(Columns):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torchmetrics.SumMetric()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.update(len(x))
            return super().forward(x)

    module = Counts()
    unit = Unit(module=module, layout=ech.DDPStrategy(sync_batchnorm=True))
    ech.train(unit, ech.Loader(_nine(), BATCH, shuffle=False), max_epochs=1)
    return float(module.seen.sum_value), [name for name in module.state_dict() if "seen" in name]


def test_a_metric_within_the_module_does_not_count_it(ranks: Ranks) -> None:
    found = ranks(2, _metric_in_a_module)
    assert [seen for seen, _ in found] == [5, 4] and not found[0][1]
