"""What a script does between its calls of `train`, in any order, trains under each layout what it trains in one process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.units import FORMS, KINDS, Hooks, Regression

pytestmark = pytest.mark.standing_ranks

X, Y = batch(20, 0)


def _loader(rows: int = 20) -> Any:
    return ech.Loader(list(zip(X[:rows], Y[:rows], strict=True)), global_batch=8, shuffle=False)  # the last update has 4 rows


def _scale(unit: Any) -> None:
    with torch.no_grad():
        for parameter in unit.module.parameters():
            parameter.mul_(0.9)


def _looks(unit: Any, *, gradients: bool = False, backward: bool = False) -> None:
    with torch.set_grad_enabled(gradients):
        out = unit.module(X[:4])
    if backward:
        out.square().mean().backward()


def _given(unit: Any) -> None:
    unit.optimizer = torch.optim.SGD(unit.module.parameters(), lr=0.05)


class _Planted(Exception): ...


def _fails(*_: object) -> None:
    raise _Planted


def _error(unit: Any) -> None:
    """In the first micro-batch of an update."""
    with contextlib.suppress(_Planted):
        ech.train(unit, _loader(), max_epochs=1, callbacks=[Hooks(on_train_step_end=_fails)])


def _error_in_evaluation(unit: Any) -> None:
    with contextlib.suppress(_Planted):
        ech.evaluate(unit, _loader(12), callbacks=[Hooks(on_eval_step_end=_fails)])


STEPS: dict[str, Callable[[Any], Any]] = {
    "train": lambda unit: ech.train(unit, _loader(), max_epochs=1),
    "one update": lambda unit: ech.train(unit, _loader(), max_updates=1),
    "fit": lambda unit: ech.fit(unit, _loader(), _loader(12), max_epochs=1),
    "fit, written after evaluations": lambda unit: ech.train(
        unit,
        _loader(),
        max_epochs=1,
        eval=_loader(12),
        eval_every=1,
        callbacks=[Hooks(on_eval_epoch_end=lambda _, u: _scale(u), on_eval_end=lambda _, u: _scale(u))],
    ),
    "evaluate": lambda unit: ech.evaluate(unit, _loader(12)),
    "an error": _error,
    "an error in an evaluation": _error_in_evaluation,
    "looks": _looks,
    "looks, with a graph": partial(_looks, gradients=True),
    "goes back": partial(_looks, gradients=True, backward=True),
    "scales": _scale,
    "loads": lambda unit: unit.module.load_state_dict(net(1).state_dict()),
    "optimizer": _given,
    "freezes": lambda unit: unit.module.blocks[0].requires_grad_(False),
    "unfreezes": lambda unit: unit.module.requires_grad_(True),
    "eval mode": lambda unit: unit.module.eval(),
}
ORDERS = [
    ["evaluate", "scales", "train"],
    ["train", "looks", "scales", "train"],
    ["looks, with a graph", "scales", "train", "looks, with a graph", "scales", "train"],
    ["evaluate", "looks", "optimizer", "train"],  # of gathered parameters, it stepped on freed memory
    ["fit, written after evaluations"],
    ["train", "goes back", "train"],  # the last update, of fewer rows, had another weight
    ["an error", "an error in an evaluation", "scales", "train"],
]


def _drawn(seed: int) -> list[str]:
    draw = random.Random(seed)
    order = [draw.choice(list(STEPS)) for _ in range(draw.choice([5, 7]))]
    # DistributedDataParallel takes no pass of one's own with a graph once parameters are frozen: the next update is refused.
    return [step for step in order if step not in ("goes back", "looks, with a graph") or "freezes" not in order]


def _values(orders: list[list[str]], layouts: list[str | None]) -> list[list[list[dict[str, torch.Tensor]]]]:
    """For each layout and order, the parameters after each step."""

    def each(order: list[str], layout: str | None) -> list[dict[str, torch.Tensor]]:
        clip = 0.5 if len(order) % 2 else None
        unit: Any = Regression(module=net(), layout=layout, accumulate=2, clip_grad_norm=clip)
        seen = []
        for step in order:
            STEPS[step](unit)
            seen.append(whole(unit.prepared))
        return seen

    return [[each(order, layout) for order in orders] for layout in layouts]


def _compare(ranks: Ranks, orders: list[list[str]], layouts: list[str]) -> None:
    (alone,) = _values(orders, [None])
    for rank, held in enumerate(ranks(2, _values, orders, layouts)):
        for layout, of_orders in zip(layouts, held, strict=True):
            for order, expected, seen in zip(orders, alone, of_orders, strict=True):
                apart = [largest_difference(a, b) for a, b in zip(seen, expected, strict=True)]
                assert max(apart) < 1e-12, f"rank {rank}, {layout}: {list(zip(order, apart, strict=True))}"


def test_what_was_seen_to_differ_no_longer_does(ranks: Ranks) -> None:
    _compare(ranks, ORDERS, ["ddp", "zero1", "fsdp", "zero2"])


@pytest.mark.parametrize(
    ("layouts", "seeds"),
    [(KINDS, range(12)), pytest.param([*KINDS, *FORMS], range(12, 32), marks=pytest.mark.full)],
    ids=["kinds", "all"],
)
def test_any_order_trains_as_in_one_process(ranks: Ranks, layouts: list[str], seeds: range) -> None:
    _compare(ranks, [_drawn(seed) for seed in seeds], layouts)
