"""Ranks that stand differently in a loop of one's own: they end with one error, or one of them does and ends all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import echelon as ech
from echelon.common.errors import RankFailedError
from tests.conftest import Ranks
from tests.kit.models import seeded, whole
from tests.kit.refusals import refusal
from tests.kit.units import Regression

Leaves = Callable[[int, bool], str]


def _loop(leaves: Leaves, layout: str, accumulation: int = 1, epochs: int = 2) -> Any:
    """`leaves(batch, odd)` says what the loop does before the window of a batch, which it counts from 1."""
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    data = TensorDataset(torch.randn(32, 3).double(), torch.randn(32, 1).double())
    optimizer: Any = torch.optim.SGD(module.parameters(), 0.1)
    loader: Any = ech.Loader(data, global_batch=8, accumulate=accumulation)
    model, optimizer, loader = ech.prepare(module, optimizer, loader, layout=layout)
    batch = 0
    for _ in ech.epochs(loader, epochs):
        for x, y in loader:
            batch += 1
            what = leaves(batch, dist.get_rank() == 1)
            if what == "continue":
                continue
            if what == "break":
                break
            with ech.window(model) as window:
                window.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return batch, whole(model)


def _continues_at(at: int) -> Leaves:
    return lambda batch, odd: "continue" if odd and batch == at else ""


def _break_of_one(batch: int, odd: bool) -> str:
    return "break" if odd and batch == 3 else ""  # behind the second, at which DDP lays its buckets out


def _of_all(batch: int, odd: bool) -> str:
    return {2: "continue", 4: "continue", 6: "break"}.get(batch, "")


@pytest.mark.full
@pytest.mark.parametrize(
    ("leaves", "layout", "accumulation", "said"),
    [
        (_continues_at(2), "ddp", 1, "rank 1 skipped 1 of the batches that the others trained on"),
        (_continues_at(2), "ddp", 2, "rank 1 skipped 1 of the batches that the others trained on"),
        (_continues_at(2), "fsdp", 1, "rank 1 skipped 1 of the batches that the others trained on"),
        (_continues_at(4), "ddp", 1, "rank 1 skipped 1 of the batches that the others trained on"),  # an epoch's last
        (_break_of_one, "ddp", 1, "rank 1 left the loop over the batches, which the others go on with"),
    ],
    ids=["continue-ddp", "continue-accumulation", "continue-fsdp", "continue-last", "break-ddp"],
)
def test_a_batch_that_one_rank_leaves_out_ends_all(
    ranks: Ranks, leaves: Leaves, layout: str, accumulation: int, said: str
) -> None:
    with pytest.raises(RankFailedError) as caught:
        ranks(2, _loop, leaves, layout, accumulation)
    assert f"RanksDisagreeError: {said}" in str(caught.value)


@pytest.mark.standing_ranks
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_batches_that_all_leave_out_are_left_out(ranks: Ranks, layout: str, accumulation: int) -> None:
    (batches, mine), (others_batches, others) = ranks(2, _loop, _of_all, layout, accumulation)
    assert batches == others_batches
    assert all(torch.equal(mine[name], others[name]) for name in mine)


def _leaves_other_numbers(batch: int, odd: bool) -> str:
    return "continue" if batch in ((1, 2) if odd else (1,)) else ""


@pytest.mark.standing_ranks
def test_other_numbers_of_batches_are_told_to_all(ranks: Ranks) -> None:
    first, second = ranks(2, refusal, _loop, _leaves_other_numbers, "ddp", kind=ech.errors.RanksDisagreeError)
    assert first == second and "rank 0: 1 skipped" in first and "rank 1: 2 skipped" in first


def _other_rows(**axes: Any) -> str:
    parts: Any = {"up": nn.Linear(3, 8), "act": nn.ReLU(), "down": nn.Linear(8, 1)}
    rows = 4 + dist.get_rank()
    data = [(torch.randn(rows, 3).double(), torch.randn(rows, 1).double())]
    unit = Regression(module=seeded(lambda: nn.Sequential(OrderedDict(parts))), layout=ech.Layout(**axes))
    return refusal(ech.train, unit, data, max_epochs=1, kind=ech.errors.RanksDisagreeError)


@pytest.mark.standing_ranks
@pytest.mark.parametrize("axes", [{"tp": 2, "plan": {"up": "colwise", "down": "rowwise"}}, {"pp": 2, "stages": ["down"]}])
def test_ranks_of_the_same_samples_are_told_of_other_rows(ranks: Ranks, axes: dict[str, Any]) -> None:
    first, second = ranks(2, _other_rows, **axes)
    assert first == second and "[[4, 3], [4, 1]] on rank 0" in first and "[[5, 3], [5, 1]] on rank 1" in first


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)) * scale)


class _ScalesAlone(Regression):
    def compute_loss(self, state: Any, data: Any) -> Any:
        out = self.module(data[0], torch.full((1,), 1.0 + dist.get_rank()).double())
        return nn.functional.mse_loss(out, data[1]), out


def _other_scale() -> str:
    data = [(torch.randn(4, 16, 3).double(), torch.randn(4, 16, 1).double())]
    unit = _ScalesAlone(module=seeded(_Scaled), layout="cp=2")
    return refusal(ech.train, unit, data, max_epochs=1, kind=ech.errors.ContextParallelError)


@pytest.mark.standing_ranks
def test_a_value_that_the_ranks_of_a_sequence_have_otherwise_is_told_to_all(ranks: Ranks) -> None:
    first, second = ranks(2, _other_scale)
    assert first == second and "argument 1 on the 2 ranks of a sequence" in first
