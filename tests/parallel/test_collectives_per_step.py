"""How often ranks wait for one another in a training step, apart from what the layout sends: not at all, as a rule."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

import echelon as ech
from tests.kit.models import batch, net
from tests.kit.units import Hooks, Own, Regression

pytestmark = pytest.mark.standing_ranks

STEPS = 8
NAMES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier", "gather", "scatter", "reduce")


class Waiting(ech.Callback):
    """Counts the collectives on which this rank waits, from the third step's beginning to the seventh's."""

    may_stop = False

    def __init__(self) -> None:
        self.count, self.counts = 0, False
        self._patches = [mock.patch(f"torch.distributed.{name}", self._counted(getattr(dist, name))) for name in NAMES]

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            # The layout's own, which torch 2.11 sends by these names.
            by_fsdp = sys._getframe(1).f_globals["__name__"].startswith("torch.distributed.fsdp")
            self.count += self.counts and not by_fsdp and not kwargs.get("async_op", False)
            return collective(*args, **kwargs)

        return call

    def on_train_start(self, state: ech.State, unit: Any) -> None:
        for patch in self._patches:
            patch.start()

    def on_train_step_start(self, state: ech.State, unit: Any) -> None:
        self.counts = 2 <= unit.train_progress.num_steps_completed < 6

    def on_train_end(self, state: ech.State, unit: Any) -> None:
        for patch in self._patches:
            patch.stop()


def quiet(layout: str) -> Regression:
    """Looks at its steps, and never stops the run."""
    unit = Regression(layout=layout)
    unit.may_stop = False
    return unit


def by_hand(layout: str) -> Own:
    """A step of the user's own, which sends no messages."""
    unit = Own(ech.layouts.prepare_module(net(), torch.device("cpu"), layout=layout))
    unit.may_stop = False
    return unit


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (batch(2, i) for i in range(STEPS))


def waits_in_four_steps(folder: str) -> dict[str, int]:
    sized = [batch(2, i) for i in range(STEPS)]
    unsized = torch.utils.data.DataLoader(Endless(), batch_size=None)
    found = {}
    cases: list[tuple[str, Callable[..., Any], Any, Callable[[str], list[ech.Callback]]]] = [
        ("a loader with a length", quiet, sized, lambda at: []),
        ("a step of one's own", by_hand, sized, lambda at: []),
        ("and a saver that is not due", quiet, sized, lambda at: [ech.DistributedCheckpointSaver(at, save_every_n_updates=100)]),
        ("a callback that may stop", quiet, sized, lambda at: [Hooks(on_train_step_end=lambda state, unit: None)]),
        ("a hook of the unit's that may stop", lambda layout: Regression(layout=layout), sized, lambda at: []),
        ("a loader without a length", quiet, unsized, lambda at: []),
    ]
    for name, kind, loader, more in cases:
        for layout in ("ddp", "fsdp"):
            waiting = Waiting()
            ech.train(kind(layout), loader, max_epochs=1, callbacks=[waiting, *more(f"{folder}/{layout}")])
            found[f"{name}, {layout}"] = waiting.count
    return found


@pytest.mark.full
def test_ranks_wait_for_one_another_only_where_nothing_else_can_tell(ranks: Any, tmp_path: Any) -> None:
    """Once a step where a hook may ask for a stop, which all ranks make after the same step, or where only the next batch tells
    whether there is one; see docs/decisions.md.
    """
    never = ("a loader with a length", "a step of one's own", "and a saver that is not due")
    for found in ranks(2, waits_in_four_steps, str(tmp_path)):
        for name, count in found.items():
            assert count == (0 if name.rsplit(",", 1)[0] in never else 4), f"{name}: {count} in 4 steps"


def steps_before_a_stop() -> list[int]:
    found = []
    for kind in (quiet, by_hand):
        for may_stop in (True, False):
            unit = kind("ddp")
            unit.may_stop = may_stop

            def stops(state: ech.State, *step: Any, unit: Any = unit) -> None:
                if dist.get_rank() == 1 and unit.train_progress.num_steps_completed == 3:
                    state.stop()

            unit.on_train_step_end = stops
            ech.train(unit, [batch(2, i) for i in range(STEPS)], max_epochs=2)
            found.append(unit.train_progress.num_steps_completed)
    return found


@pytest.mark.full
def test_a_stop_comes_after_its_step_or_where_nothing_waits_one_later(ranks: Any) -> None:
    assert ranks(2, steps_before_a_stop) == [[4, 5, 3, 4]] * 2
