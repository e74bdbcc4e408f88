"""Who looks on is asked by `train` and `fit` themselves, however a program came by them; nothing is replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon import Callback, fit, train  # bound before anybody looks on
from echelon.common.errors import LaunchError
from echelon.contracts.overrides import Overrides, impose
from echelon.launcher.functions.launch import launch, spawn
from echelon.loop.reporting.reporting import observing
from echelon.loop.unit import EvalUnit, TrainUnit
from echelon.prover.workarounds import without_autocast
from tests.kit.refusals import refused


class _Unit(TrainUnit[int], EvalUnit[int]):
    def train_step(self, state: Any, data: int) -> None: ...

    def eval_step(self, state: Any, data: int) -> None: ...


class _Counts(Callback):
    steps = 0

    def on_train_step_end(self, state: Any, unit: Any) -> None:
        self.steps += 1


def test_calls_by_a_name_that_was_imported_before_are_seen() -> None:
    unit, mine, added = _Unit(), _Counts(), _Counts()
    seen: list[Any] = []

    def watch(unit: Any, dataloader: Any, callbacks: list[Callback]) -> list[Callback]:
        seen.append((unit, list(dataloader), callbacks))
        return [*callbacks, added]

    with observing(watch):
        train(unit, [1, 2], max_updates=2, callbacks=[mine])
        fit(unit, train_dataloader=[3], eval_dataloader=[4], max_updates=3)
    train(unit, [5], max_updates=4)
    assert seen == [(unit, [1, 2], [mine]), (unit, [3], [])]
    assert (mine.steps, added.steps) == (2, 3)


def test_what_an_observer_raises_ends_the_call_and_the_looking_on() -> None:
    class Enough(BaseException): ...

    def stop(*args: Any) -> list[Callback]:
        raise Enough

    unit = _Unit()
    with pytest.raises(Enough), observing(stop):
        train(unit, [1], max_updates=1)
    train(unit, [1], max_updates=1)
    assert unit.train_progress.num_steps_completed == 1


@pytest.mark.parametrize("start", [launch, spawn])
def test_ranks_are_not_started_where_prove_starts_them(start: Any) -> None:
    impose(Overrides(observes=True))
    try:
        with refused(LaunchError):
            start(print)
    finally:
        impose(None)


def test_autocast_still_needs_a_replacement_to_stay_off() -> None:
    """If `torch.set_autocast_enabled` or the like keeps a later `with torch.autocast(...)` off: take `without_autocast` away."""
    a = torch.ones(2, 2)
    torch.set_autocast_enabled("cpu", False)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16
    with without_autocast(), torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16
