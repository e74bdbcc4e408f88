"""Compute precision and the loss scale: one verdict over all ranks, whatever is sharded; schedules that follow updates.

Autocast leaves float64 alone, and scales are powers of two: so fp16's whole machinery can be held against plain PyTorch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.common.errors import LoopError, UsageError
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, plain_training, seeded, whole
from tests.kit.refusals import answer, refused
from tests.kit.run_folders import recorded
from tests.kit.units import KINDS, Hooks, Regression

pytestmark = pytest.mark.standing_ranks


def _fp16(**options: Any) -> ech.layouts.Precision:
    return ech.layouts.Precision(torch.float16, **{"init_scale": 1024.0, **options})


class Spiked(Net):
    """With two numbers that the outputs do not depend on; the second's gradient can be made to overflow by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.spike = nn.Parameter(torch.zeros(2))


class Whole(nn.Module):
    """Takes the loss inside the forward, as a sharded parameter is whole only there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = seeded(Spiked)

    @property
    def tp_plan(self) -> dict[str, str]:
        return {f"inner.{n}": style for n, style in Net.tp_plan.items()}

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x), (factor * self.inner.spike).sum()


class Overflows(Regression):
    """At update 1, one element of one gradient is inf, on the last data-parallel rank. In a shard, one rank has it."""

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        place = self.prepared
        bad = self.train_progress.num_steps_completed == 1 and place.data.rank == place.data.size - 1
        out, spike = self.module(data[0], torch.tensor([0.0, math.inf if bad else 0.0], dtype=torch.float64))
        return nn.functional.mse_loss(out, data[1]) + spike, out


def _mine(unit: ech.AutoUnit[Any], count: int) -> list[Any]:
    """This rank's share of global batches of 8 rows."""
    rank, size = unit.prepared.data.rank, unit.prepared.data.size
    return [tuple(t.chunk(size)[rank] for t in batch(8, i)) for i in range(count)]


def _weights(unit: ech.AutoUnit[Any]) -> dict[str, torch.Tensor]:
    return {n.removeprefix("inner."): p for n, p in whole(unit.module).items()}


def _overflow(layout: Any) -> dict[str, Any]:
    unit = Overflows(
        module=Whole(),
        layout=layout,
        precision=_fp16(growth_interval=2),
        clip_grad_norm=0.3,
        step_lr_interval="step",
        schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=1.0),
    )
    ech.train(unit, _mine(unit, 4), max_epochs=1)
    assert unit.grad_scaler is not None
    scheduled = unit.lr_scheduler.last_epoch
    return {"weights": _weights(unit), "norms": unit.norms, "scale": unit.grad_scaler.get_scale(), "scheduled": scheduled}


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, None),
        *(pytest.param(2, layout, marks=pytest.mark.full) for layout in (*KINDS, "zero2")),
        *(pytest.param(4, layout, marks=pytest.mark.full) for layout in ("tp=2", "hsdp")),
    ],
)
def test_an_inf_in_one_shard_skips_the_update_on_all_ranks(ranks: Ranks, size: int, layout: Any) -> None:
    applied = [[batch(8, i)] for i in (0, 2, 3)]  # update 1 is skipped
    want, _, norms = plain_training(applied, clip=0.3, module=seeded(Spiked))
    for got in ranks(size, _overflow, layout):
        assert not math.isfinite(got["norms"].pop(1))
        assert got["norms"] == pytest.approx(norms, rel=1e-12)
        assert largest_difference(got["weights"], want) < 1e-9  # torch divides by norm + 1e-6
        assert got["scale"] == 1024.0  # halved, then doubled after two updates
        assert got["scheduled"] == 3  # the schedule holds still with the parameters


def _scale_after_overflow(layout: str, folder: str) -> float:
    unit = Overflows(module=Whole(), layout=layout, precision=_fp16())
    ech.train(unit, _mine(unit, 2), max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(folder)])
    assert unit.grad_scaler is not None
    return unit.grad_scaler.get_scale()


@pytest.mark.full
def test_the_scale_is_saved_and_restored_by_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _scale_after_overflow, "fsdp", str(tmp_path)) == [512.0, 512.0]
    unit = Overflows(module=Whole(), precision=_fp16())
    assert ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, unit)
    assert unit.grad_scaler is not None and unit.grad_scaler.get_scale() == 512.0


def _own_scaler(layout: str) -> None:
    unit = Regression(layout=layout, precision="fp16")
    unit.grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    ech.train(unit, _mine(unit, 1), max_epochs=1)


def test_a_scaler_of_ones_own_is_taken_unless_ranks_would_part_ways(ranks: Ranks) -> None:
    _own_scaler("none")
    assert ranks(2, _own_scaler, "ddp") == [None, None]
    assert all("ech.layouts.Precision(torch.float16" in text for text in ranks(2, answer, _own_scaler, "fsdp"))


def test_a_parameter_outside_the_module_is_unscaled_too() -> None:
    class Temperature(Regression):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

        def compute_loss(self, state: ech.State, data: Any) -> Any:
            out = self.module(data[0]) * self.temperature
            return nn.functional.mse_loss(out, data[1]), out

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
            return torch.optim.SGD([*module.parameters(), self.temperature], lr=0.1), None

    values = []
    for precision in ("fp32", _fp16()):
        unit = Temperature(precision=precision)
        ech.train(unit, [batch(4, i) for i in range(3)], max_epochs=1)
        values.append(float(unit.temperature.detach()))
    assert values[0] == pytest.approx(values[1], rel=1e-12) and values[0] != 1.0


def test_a_scaler_grows_and_shrinks_as_its_options_say() -> None:
    options = {"init_scale": 16.0, "growth_factor": 4.0, "growth_interval": 3, "backoff_factor": 0.25}
    unit = Overflows(module=Whole(), precision=ech.layouts.Precision(torch.float16, **options))
    scales = list[float]()
    note = Hooks(on_train_step_end=lambda state, unit: scales.append(unit.grad_scaler.get_scale()))
    ech.train(unit, _mine(unit, 5), max_epochs=1, callbacks=[note])
    assert scales == [16.0, 4.0, 4.0, 4.0, 16.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ech.layouts.Precision(torch.float64), "torch.bfloat16"),
        (lambda: ech.layouts.Precision(torch.float16, growth_factor=0.5), "growth_factor must be above 1, got 0.5"),
        (lambda: ech.layouts.Precision(torch.float16, init_scale=0), "init_scale must be above 0, got 0"),
        (lambda: Regression(precision="16-mixed"), "must be 'fp32', 'bf16', 'fp16', .*, got '16-mixed'"),
        (lambda: Regression(precision=torch.float64), "must be .*, got torch.float64"),
    ],
)
def test_bad_precisions_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


# --- a scheduler that wants a metric


def _plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)


class Worse(Regression):
    """Each evaluation is worse than the one before."""

    evaluations = 0

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        loss, out = super().compute_loss(state, data)
        if state.active_phase is not ech.units.ActivePhase.EVALUATE:
            return loss, out
        self.evaluations += 1
        return loss * 0 + self.evaluations, out


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_reduce_on_plateau_follows_the_evaluations_of_fit(interval: Any) -> None:
    unit = Worse(schedule=_plateau, step_lr_interval=interval)
    ech.fit(unit, [batch(2, 0)] * 3, [batch(2, 1)], max_epochs=3, evaluate_every_n_epochs=1)
    assert unit.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**2)  # the first evaluation sets the mark


def test_reduce_on_plateau_without_evaluations_is_refused_before_training() -> None:
    unit = Regression(schedule=_plateau)
    with refused(LoopError):
        ech.train(unit, [batch(2, 0)], max_epochs=1)
    assert unit.train_progress.num_steps_completed == 0


def test_an_eval_step_of_ones_own_records_no_loss_that_it_did_not_count(tmp_path: Path) -> None:
    class Own(Regression):
        def eval_step(self, state: ech.State, data: Any) -> Any:
            state.log("val", self.compute_loss(state, data)[0])

    with recorded(tmp_path):
        ech.fit(Own(), [batch(2, 0)], [batch(2, 1)], max_epochs=1, evaluate_every_n_epochs=1)
    written = (tmp_path / "metrics.jsonl").read_text()
    assert "eval_val" in written and "eval_loss" not in written
    with refused(LoopError):
        ech.fit(Own(schedule=_plateau), [batch(2, 0)], [batch(2, 1)], max_epochs=1, evaluate_every_n_epochs=1)


def test_a_unit_may_step_a_plateau_scheduler_itself() -> None:
    class Own(Worse):
        def step_lr_scheduler(self) -> None:
            self.lr_scheduler.step(float(self.train_progress.num_epochs_completed))

    unit = Own(schedule=_plateau)
    ech.train(unit, [batch(2, 0)], max_epochs=3)
    assert unit.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**2)
    ech.fit(unit, [batch(2, 0)], [batch(2, 1)], max_epochs=4, evaluate_every_n_epochs=1)
    assert unit.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**3)  # not once more by the evaluation
