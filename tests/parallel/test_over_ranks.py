"""`gather`, `gathered_rows` and `all_mean`: losses that compare a sample with those of all ranks train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import echelon as ech
from echelon.parallel.over_ranks import all_mean, gather, gathered_rows
from tests.conftest import Ranks
from tests.kit.models import seeded, whole
from tests.kit.refusals import refusal
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

ROWS, BATCH = 22, 8  # the last global batch has 6 rows, and on four ranks some have fewer than others


def _tower() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))


def _pairs(rows: int = ROWS) -> torch.utils.data.TensorDataset:
    made = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(*(torch.randn(rows, 4, generator=made, dtype=torch.float64) for _ in range(2)))


def _contrast(module: nn.Module, data: Any) -> torch.Tensor:
    """InfoNCE: each row against the other views of all rows."""
    one, other = (F.normalize(module(x), dim=1) for x in data)
    return F.cross_entropy(5 * one @ gather(other).T, gathered_rows(other))


def _spread(module: nn.Module, data: Any) -> torch.Tensor:
    """The same loss of all rows on every rank, and one that needs a second derivative of what was gathered."""
    x = data[0].requires_grad_()
    rows = module(x)
    every = gather(rows)
    (slope,) = torch.autograd.grad((rows @ every.T).square().sum() / 20, x, create_graph=True)
    return every.std(0).mean() + gather(slope).square().mean()


def _train(loss: Any, layout: Any, rows: int = ROWS) -> dict[str, torch.Tensor]:
    unit = Regression(module=_tower(), layout=layout, lr=0.5, loss=loss)
    ech.train(unit, ech.Loader(_pairs(rows), BATCH, seed=3), max_epochs=2)
    return whole(unit.module)


def _check(ranks: Ranks, count: int, loss: Any, layout: Any, rows: int = ROWS) -> None:
    alone = _train(loss, None, rows)
    for trained in ranks(count, _train, loss, layout, rows):
        for name, value in alone.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.full
@pytest.mark.parametrize(
    ("loss", "layout"), [(_contrast, "ddp"), (_contrast, "fsdp"), (_contrast, "zero1"), (_spread, "ddp"), (_spread, "zero1")]
)
def test_a_loss_over_all_ranks_rows_trains_as_one_process(ranks: Ranks, loss: Any, layout: str) -> None:
    _check(ranks, 2, loss, layout)


PLAN = {"0": "colwise", "2": "rowwise"}


@pytest.mark.full
@pytest.mark.parametrize(("axes", "count"), [({"tp": 2}, 2), ({"dp_shard": 2, "tp": 2}, 4)], ids=["tp", "fsdp x tp"])
def test_ranks_that_share_samples_count_once(ranks: Ranks, axes: dict[str, int], count: int) -> None:
    _check(ranks, count, _contrast, ech.Layout(**axes, plan=PLAN))


@pytest.mark.full
def test_a_rank_without_samples_gives_none(ranks: Ranks) -> None:
    """17 rows in global batches of 8: the last has one row, and three of four ranks have padding only."""
    _check(ranks, 4, _contrast, "ddp", 17)


def _uneven() -> list[Any]:
    rank = dist.get_rank()
    mine = torch.arange(2.0 * rank * 3).reshape(2 * rank, 3) + 10 * rank  # 0, 2, 4, 6 rows
    columns = gather(mine.T.contiguous(), dim=1)
    assert torch.equal(columns, gather(mine.T.contiguous(), dim=-1))
    mean, plain = all_mean(torch.tensor([float(rank), 1.0])), all_mean(rank, weight=rank)
    flags = gather(torch.ones(1, dtype=torch.bool)).tolist()
    return [gather(mine).tolist(), columns.T.tolist(), gathered_rows(mine).tolist(), mean.tolist(), plain, flags]


def test_uneven_rows_come_in_the_order_of_ranks(ranks: Ranks) -> None:
    told = ranks(4, _uneven)
    expected = torch.cat([torch.arange(2.0 * r * 3).reshape(2 * r, 3) + 10 * r for r in range(4)]).tolist()
    assert all(each[0] == each[1] == expected for each in told)
    assert [each[2] for each in told] == [[], [0, 1], [2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert all(each[3] == [1.5, 1.0] and each[4] == pytest.approx((1 + 4 + 9) / 6) and each[5] == [True] * 4 for each in told)


def _odd_shapes() -> list[str]:
    odd, whole = dist.get_rank() == 1, torch.zeros(2, 3)
    given = [
        (torch.zeros(2, 3 + odd), 0),
        (torch.zeros(()) if odd else whole, 0),
        (whole[:, 0] if odd else whole, 0),
        (whole, int(odd)),
        (whole.double() if odd else whole, 0),
        (torch.zeros(()), 0),
    ]
    return [refusal(gather, tensor, dim) for tensor, dim in given]


def test_other_shapes_are_refused_on_all_ranks(ranks: Ranks) -> None:
    texts = ranks(2, _odd_shapes)
    assert texts[0] == texts[1] and all("rank 1" in text for text in texts[0])


def test_one_process_keeps_what_it_has() -> None:
    x = torch.randn(3, 2)
    assert gather(x) is x and all_mean(2.5) == 2.5 and gathered_rows(x).tolist() == [0, 1, 2]
    assert (ech.rank(), ech.world_size(), ech.is_main()) == (0, 1, True)
