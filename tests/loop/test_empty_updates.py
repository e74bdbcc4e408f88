"""A global batch that weighs nothing trains nothing, and the run goes on: all labels left out, or all samples filtered."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.common.errors import LoopError
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.refusals import refused
from tests.kit.units import Hooks, Masked

pytestmark = pytest.mark.standing_ranks

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
