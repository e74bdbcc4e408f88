"""Numbers of the user's own over all ranks: exact whatever ranks and micro-batches; an error where ranks log different ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.common.errors import LoggerError, RanksDisagreeError
from echelon.contracts.events import read_lines
from echelon.loop.records.logged import Logged
from tests.conftest import Ranks
from tests.kit.models import batch
from tests.kit.refusals import refused
from tests.kit.run_folders import recorded
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks


class Logs(Regression):
    """Logs the mean of its inputs, their sum, and the least and greatest of them, in training and in evaluation."""

    def compute_loss(self, state: Any, data: Any) -> Any:
        x = data[0]
        state.log("x", x.mean())
        state.log("total", float(x.sum()), reduce="sum")
        state.log("least", x.min().item(), reduce="min")
        state.log("most", x.max(), reduce="max")
        return super().compute_loss(state, data)


# Six batches of other sizes: three updates of two micro-batches each on one rank, the same samples on two.
SIZES = [3, 5, 2, 6, 1, 7]


def _fit(folder: str, kind: type = Logs) -> list[dict[str, Any]]:
    """The records of a run, as rank 0 has written them."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = [batch(size, n) for n, size in enumerate(SIZES)][rank::ranks]
    unit = kind(gradient_accumulation_steps=2 // ranks, **({"layout": "ddp"} if ranks > 1 else {}))
    with recorded(f"{folder}/of-{ranks}") as run:
        ech.fit(unit, mine, mine, max_epochs=1)
    return list(read_lines(run.metrics))


def test_a_number_is_that_of_the_global_batch_on_one_rank_and_on_two(ranks: Ranks, tmp_path: Path) -> None:
    ours = _fit(str(tmp_path))
    ranks(2, _fit, str(tmp_path))
    theirs = list(read_lines(tmp_path / "of-2" / "metrics.jsonl"))
    for update, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        which = slice(2 * update, 2 * update + 2) if update < 3 else slice(None)
        x = torch.cat([batch(size, n)[0] for n, size in list(enumerate(SIZES))[which]]).double()
        prefix = "" if update < 3 else "eval_"
        if update == 3 and "eval_loss" in one:
            continue
        wanted = {"x": x.mean(), "total": x.sum(), "least": x.min(), "most": x.max()}
        for name, value in wanted.items():
            assert one[prefix + name] == pytest.approx(float(value), rel=1e-6), (update, name)
            assert two[prefix + name] == pytest.approx(float(value), rel=1e-6), (update, name)
    assert any("eval_x" in record for record in ours) and len(ours) == len(theirs) == 5


def _nothing(rank: int) -> list[tuple[str, str]]:
    return []


# What a rank logs in its steps and in its evaluations, and what all are told.
TOLD: list[tuple[Any, Any, str]] = [
    (lambda rank: [("a", "mean"), ("b", "mean")][: rank + 1], _nothing, "log in an update: rank 0: a, rank 1: a, b."),
    (lambda rank: [("a", "mean")][rank:], _nothing, "log in an update: rank 0: a, rank 1: nothing."),
    (lambda rank: [("a", ("mean", "sum")[rank])], _nothing, "log in an update: rank 0: a (mean), rank 1: a (sum)."),
    (_nothing, lambda rank: [("c", "mean")][1 - rank :], "logged in the eval epoch: rank 0: nothing, rank 1: c."),
]


class OtherNames(Regression):
    def __init__(self, in_steps: Any, in_evaluations: Any) -> None:
        super().__init__(layout="ddp")
        self.in_steps, self.in_evaluations = in_steps, in_evaluations

    def compute_loss(self, state: Any, data: Any) -> Any:
        for name, reduce in self.in_steps(dist.get_rank()):
            state.log(name, 1.0, reduce=reduce)
        return super().compute_loss(state, data)

    def on_eval_step_end(self, state: Any, *results: Any) -> None:
        for name, reduce in self.in_evaluations(dist.get_rank()):
            state.log(name, 1.0, reduce=reduce)


def _errors() -> list[str]:
    found = []
    for *logs, _ in TOLD:
        with pytest.raises(RanksDisagreeError) as caught:
            ech.fit(OtherNames(*logs), [batch(4, 0)] * 2, [batch(4, 1)], max_epochs=1)
        found.append(str(caught.value))
    return found


def test_ranks_that_log_different_names_are_told_which(ranks: Ranks) -> None:
    for errors in ranks(2, _errors):
        for (*_, said), error in zip(TOLD, errors, strict=True):
            assert said in error and "Log the same names on all ranks" in error


class Metrics(Regression):
    """With metrics of torchmetrics, whose values over all ranks are their own business; rank 1 logs them in the other order."""

    def __init__(self, **options: Any) -> None:
        from torchmetrics import MeanMetric

        super().__init__(**options)
        self.metrics = {"rows": MeanMetric(), "low": MeanMetric()}

    def on_eval_step_end(self, state: Any, data: Any, *results: Any) -> None:
        self.metrics["rows"].update(data[0].sum(1))
        self.metrics["low"].update(-9.0)
        for name in sorted(self.metrics, reverse=dist.get_rank() == 1):
            state.log(name, self.metrics[name])


def test_metrics_of_torchmetrics_are_computed_at_the_epochs_end_in_one_order_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _fit, str(tmp_path), Metrics)
    rows = torch.cat([batch(size, n)[0] for n, size in enumerate(SIZES)]).sum(1)
    (found,) = [r for r in read_lines(tmp_path / "of-2" / "metrics.jsonl") if "eval_rows" in r]
    assert found["eval_rows"] == pytest.approx(float(rows.mean()), rel=1e-5) and found["eval_low"] == -9.0


class Own(ech.TrainUnit[Any]):
    """A unit without updates of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(1, 1)

    def train_step(self, state: Any, data: Any) -> None:
        state.log("n", float(data), weight=data)


def _own(folder: str) -> None:
    rank = dist.get_rank()
    with recorded(folder):
        ech.train(Own(), [1.0 + rank, 3.0 + rank], max_epochs=1)


def test_a_unit_of_ones_own_gets_the_numbers_of_its_epochs(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _own, str(tmp_path))
    (record,) = read_lines(tmp_path / "metrics.jsonl")
    assert record["n"] == pytest.approx((1 + 4 + 9 + 16) / 10) and record["step"] == 2


# What may be logged


MANY = 2.0**24 + 1  # which float32 has not got


def test_numbers_of_the_host_stay_exact_beside_a_weight_on_a_device() -> None:
    """A tensor as a weight stands for one on a GPU: the host's own are floats by then."""
    logged = Logged()
    logged.begins(torch.tensor(3.0, dtype=torch.float64))
    for reduce in ("mean", "sum", "min", "max"):
        logged.add("train", reduce, MANY, None, reduce)
    logged.add("train", "weighed", MANY, MANY, "mean")
    logged.end_window(None)
    assert {name: float(value) for name, value in logged.settled().items()} == dict.fromkeys(
        ("mean", "sum", "min", "max", "weighed"), MANY
    )


def _exact(values: list[Any], reduce: str, device: torch.device | None) -> str:
    """What `reduce` makes of the ranks' values, each a number and its weight, in an update on that device."""
    logged = Logged()
    value, weight = values[dist.get_rank()]
    logged.add("train", "a", value, weight, reduce)
    told = torch.tensor([*logged.signature(), 1.0], dtype=torch.float64)
    dist.all_reduce(told)
    logged.end_window(told.tolist(), device)
    return str(float(logged.settled()["a"]))


@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["host", "device"])
def test_numbers_of_the_host_stay_exact_over_the_ranks(ranks: Ranks, device: torch.device | None) -> None:
    for reduce in ("mean", "sum", "min", "max"):
        assert ranks(2, _exact, [(MANY, 1), (MANY, 1)], reduce, device) == [str(MANY * (1 + (reduce == "sum")))] * 2


# Values with weights, and what the least and the greatest of them is.
EXTREMES: list[tuple[list[Any], str]] = [
    ([(1.0, 1), (math.nan, 1)], "nan"),
    ([(math.nan, 1), (1.0, 1)], "nan"),
    ([(math.nan, 0), (1.0, 1)], "1.0"),
    ([(1.0, 0), (2.0, 0)], "nan"),
    ([(math.inf, 1), (math.inf, 1)], "inf"),
    ([(-math.inf, 1), (-math.inf, 1)], "-inf"),
]


@pytest.mark.parametrize("reduce", ["min", "max"])
def test_the_least_and_the_greatest_show_a_nan_wherever_it_stands(reduce: str) -> None:
    for values, wanted in EXTREMES:
        assert _here(values, reduce, on_device=False) == _here(values, reduce, on_device=True) == wanted, values


def _each(reduce: str) -> list[str]:
    return [_exact(values, reduce, device) for values, _ in EXTREMES for device in (None, torch.device("cpu"))]


@pytest.mark.parametrize("reduce", ["min", "max"])
def test_the_least_and_the_greatest_show_a_nan_of_whichever_rank(ranks: Ranks, reduce: str) -> None:
    assert ranks(2, _each, reduce) == [[wanted for _, wanted in EXTREMES for _ in range(2)]] * 2


def _here(values: list[Any], reduce: str, *, on_device: bool) -> str:
    """Of one rank, that logs all of them."""
    logged = Logged()
    for value, weight in values:
        logged.begins(torch.tensor(float(weight), dtype=torch.float64) if on_device else weight)
        logged.add("train", "a", value, None, reduce)
        logged.begins(1)
        logged.add("eval", "a", value, weight, reduce)
    logged.end_window(None)
    (evaluated,) = logged.end_phase("eval", together=True).values()
    settled = float(logged.settled()["a"])
    assert str(settled) == str(evaluated)
    return str(settled)


@pytest.mark.parametrize(
    ("name", "value", "reduce"),
    [
        ("loss", 1.0, "mean"),
        ("tokens_per_s", 1.0, "mean"),
        ("a\nb", 1.0, "mean"),
        ("x" * 101, 1.0, "mean"),
        ("n", 10**400, "mean"),
        ("a", torch.zeros(2), "mean"),
        ("a", "much", "mean"),
        ("a", 1.0, "median"),
    ],
)
def test_what_cannot_be_logged_is_refused(name: str, value: Any, reduce: str) -> None:
    with refused(LoggerError):
        Logged().add("train", name, value, None, reduce)


@pytest.mark.parametrize("value", [np.array([2.0]), np.array(2), np.float32(2), np.int64(2), torch.full((1, 1), 2.0)])
def test_one_number_of_numpy_is_a_number_whatever_its_dims(value: Any) -> None:
    logged = Logged()
    logged.add("train", "a", value, None, "mean")
    logged.end_window(None)
    assert logged.settled() == {"a": 2.0}


def test_a_number_keeps_its_reduction_and_what_counts_nothing_adds_nothing_not_even_nan() -> None:
    logged = Logged()
    logged.add("train", "a", math.nan, 0, "mean")
    logged.add("train", "a", 2.0, 3.0, "mean")
    logged.add("train", "b", math.nan, torch.tensor(0.0), "mean")
    with refused(LoggerError):
        logged.add("train", "a", 1.0, None, "sum")
    logged.end_window(None)
    assert str(logged.settled()) == "{'a': 2.0, 'b': nan}" and logged.settled() == {}


def _loop(folder: str, rows: int, accumulate: int) -> None:
    """Batches of four; of an accumulated update that had begun with the third the loop leaves out the rest."""
    model = torch.nn.Linear(3, 1)
    data = torch.utils.data.TensorDataset(torch.arange(3.0 * rows).reshape(rows, 3), torch.zeros(rows, 1))
    loader: Any = ech.Loader(data, global_batch=4, shuffle=False, accumulate=accumulate)
    with recorded(folder):
        model, optimizer, loader = ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader, layout="ddp")
        for _ in ech.epochs(model, 1):
            for number, (x, y) in enumerate(loader):
                with ech.window(model) as window:
                    window.log("x", x.mean())
                    window.log("most", x.max(), reduce="max")
                    window.log("rows", len(x), reduce="sum")
                    optimizer.zero_grad()
                    window.backward(((model(x) - y) ** 2).mean())
                    optimizer.step()
                if accumulate == 2 and number == 2:
                    break


def test_a_loop_of_ones_own_logs_in_its_windows(ranks: Ranks, tmp_path: Path) -> None:
    """Ten rows in batches of four: the last has two. What an unfinished update logged is left out with it."""
    ranks(2, _loop, str(tmp_path / "whole"), 10, 1)
    records = [r for r in read_lines(tmp_path / "whole" / "metrics.jsonl") if "x" in r]
    parts = torch.arange(30.0).reshape(10, 3).split(4)
    assert [(r["x"], r["most"], r["rows"]) for r in records] == [(float(p.mean()), float(p.max()), len(p)) for p in parts]
    ranks(2, _loop, str(tmp_path / "left"), 8, 2)
    assert [r["rows"] for r in read_lines(tmp_path / "left" / "metrics.jsonl") if "rows" in r] == [4]
