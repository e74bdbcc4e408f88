"""Numbers of the user's own over all ranks: exact whatever ranks and micro-batches; an error where ranks log different ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import echelon as ech
from echelon.common.errors import LoggerError, RanksDisagreeError, UsageError
from echelon.contracts.events import read_lines
from echelon.loop.records.logged import Logged
from tests.conftest import Ranks
from tests.kit.models import batch
from tests.kit.refusals import refused
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


def numbers(folder: str, name: str, unit: Any, train: list[Any], evaluate: list[Any], **limits: Any) -> list[dict[str, Any]]:
    """The records of a run, as rank 0 has written them."""
    run = ech.evidence.RunDir(Path(folder) / name)
    with pytest.MonkeyPatch.context() as patch:
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            run.at_attempt(0)
        for key, value in run.to_env().items():
            patch.setenv(key, value)
        ech.fit(unit, train, evaluate, max_epochs=1, **limits)
    return list(read_lines(run.metrics))


def _fit(folder: str, kind: type = Logs) -> list[dict[str, Any]]:
    rank, ranks = (
        (torch.distributed.get_rank(), torch.distributed.get_world_size()) if torch.distributed.is_initialized() else (0, 1)
    )
    mine = [batch(size, n) for n, size in enumerate(SIZES)][rank::ranks]
    unit = kind(gradient_accumulation_steps=2 // ranks, **({"layout": "ddp"} if ranks > 1 else {}))
    return numbers(folder, f"of-{ranks}", unit, mine, mine)


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


class OneMore(Regression):
    """Rank 1 logs a number that the others do not know."""

    def compute_loss(self, state: Any, data: Any) -> Any:
        state.log("a", 1.0)
        if torch.distributed.get_rank() == 1:
            state.log("b", 1.0)
        return super().compute_loss(state, data)


class OneLess(Regression):
    def compute_loss(self, state: Any, data: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            state.log("a", 1.0)
        return super().compute_loss(state, data)


class Otherwise(Regression):
    def compute_loss(self, state: Any, data: Any) -> Any:
        state.log("a", 1.0, reduce="sum" if torch.distributed.get_rank() else "mean")
        return super().compute_loss(state, data)


class OneInEvaluation(Regression):
    def on_eval_step_end(self, state: Any, *results: Any) -> None:
        if torch.distributed.get_rank() == 1:
            state.log("c", 1.0)


def _error_of(kind: type, folder: str) -> str:
    try:
        numbers(folder, "r", kind(layout="ddp"), [batch(4, 0)] * 2, [batch(4, 1)])
    except RanksDisagreeError as error:
        return str(error)
    return "no error"


TOLD: list[tuple[type, str]] = [
    (OneMore, "about what they log in an update: rank 0: a, rank 1: a, b."),
    (OneLess, "about what they log in an update: rank 0: a, rank 1: nothing."),
    (Otherwise, "about what they log in an update: rank 0: a (mean), rank 1: a (sum)."),
    (OneInEvaluation, "about what was logged in the eval epoch: rank 0: nothing, rank 1: c."),
]


def test_ranks_that_log_different_names_are_told_which(ranks: Ranks, tmp_path: Path) -> None:
    for errors in ranks(2, lambda: [_error_of(kind, str(tmp_path / kind.__name__)) for kind, _ in TOLD]):
        for (_, said), error in zip(TOLD, errors, strict=True):
            assert said in error and "Log the same names on all ranks" in error


class Accuracy(Regression):
    """With a metric of torchmetrics, whose value over all ranks is its own business."""

    def __init__(self, **options: Any) -> None:
        from torchmetrics import MeanMetric

        super().__init__(**options)
        self.mean = MeanMetric()

    def on_eval_step_end(self, state: Any, data: Any, *results: Any) -> None:
        self.mean.update(data[0].sum(1))
        state.log("rows", self.mean)


@pytest.mark.full
def test_a_metric_of_torchmetrics_is_computed_at_the_epochs_end(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _fit, str(tmp_path), Accuracy)
    rows = torch.cat([batch(size, n)[0] for n, size in enumerate(SIZES)]).sum(1)
    (found,) = [r["eval_rows"] for r in read_lines(tmp_path / "of-2" / "metrics.jsonl") if "eval_rows" in r]
    assert found == pytest.approx(float(rows.mean()), rel=1e-5)


class TwoMetrics(Regression):
    """Rank 1 logs them in the other order."""

    def __init__(self, **options: Any) -> None:
        from torchmetrics import MeanMetric

        super().__init__(**options)
        self.metrics = {"low": MeanMetric(), "high": MeanMetric()}

    def on_eval_step_end(self, state: Any, data: Any, *results: Any) -> None:
        self.metrics["low"].update(1.0)
        self.metrics["high"].update(9.0)
        for name in sorted(self.metrics, reverse=torch.distributed.get_rank() == 1):
            state.log(name, self.metrics[name])


def test_metrics_are_computed_in_one_order_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _fit, str(tmp_path), TwoMetrics)
    (found,) = [r for r in read_lines(tmp_path / "of-2" / "metrics.jsonl") if "eval_low" in r]
    assert (found["eval_low"], found["eval_high"]) == (1.0, 9.0)


class Own(ech.TrainUnit[Any]):
    """A unit without updates of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(1, 1)

    def train_step(self, state: Any, data: Any) -> None:
        state.log("n", float(data), weight=data)


def _own(folder: str) -> None:
    rank = torch.distributed.get_rank()
    run = ech.evidence.RunDir(Path(folder) / "own")
    with pytest.MonkeyPatch.context() as patch:
        run.at_attempt(0)
        for key, value in run.to_env().items():
            patch.setenv(key, value)
        ech.train(Own(), [1.0 + rank, 3.0 + rank], max_epochs=1)


def test_a_unit_of_ones_own_gets_the_numbers_of_its_epochs(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _own, str(tmp_path))
    (record,) = read_lines(tmp_path / "own" / "metrics.jsonl")
    assert record["n"] == pytest.approx((1 + 4 + 9 + 16) / 10) and record["step"] == 2


# What may be logged


def test_what_counts_nothing_adds_nothing_not_even_nan() -> None:
    logged = Logged()
    logged.add("train", "a", math.nan, 0, "mean")
    logged.add("train", "a", 2.0, 3.0, "mean")
    logged.add("train", "b", math.nan, torch.tensor(0.0), "mean")
    logged.end_window(None)
    assert str(logged.settled()) == "{'a': 2.0, 'b': nan}" and logged.settled() == {}


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
    value, weight = values[torch.distributed.get_rank()]
    logged.add("train", "a", value, weight, reduce)
    told = torch.tensor([*logged.signature(), 1.0], dtype=torch.float64)
    torch.distributed.all_reduce(told)
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
    ("name", "value", "options", "said"),
    [
        ("loss", 1.0, {}, "have a number 'loss' of their own"),
        ("tokens_per_s", 1.0, {}, "of their own"),
        ("a\nb", 1.0, {}, "name must be 1 to 100 characters that can be printed, on one line"),
        ("x" * 101, 1.0, {}, "name must be 1 to 100 characters"),
        ("n", 10**400, {}, "must be given a number that a float can hold"),
        ("a", torch.zeros(2), {}, "must be given one number, got 2"),
        ("a", "much", {}, "a number or a metric, got a str"),
        ("a", 1.0, {"reduce": "median"}, "reduce must be 'mean', 'sum', 'min' or 'max'"),
    ],
)
def test_what_cannot_be_logged_is_refused(name: str, value: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Logged().add("train", name, value, None, options.get("reduce", "mean"))


@pytest.mark.parametrize("value", [np.array([2.0]), np.array(2), np.float32(2), np.int64(2), torch.full((1, 1), 2.0)])
def test_one_number_of_numpy_is_a_number_whatever_its_dims(value: Any) -> None:
    logged = Logged()
    logged.add("train", "a", value, None, "mean")
    logged.end_window(None)
    assert logged.settled() == {"a": 2.0}


def test_a_number_keeps_its_reduction() -> None:
    logged = Logged()
    logged.add("train", "a", 1.0, None, "sum")
    with refused(LoggerError):
        logged.add("train", "a", 1.0, None, "mean")


def _left(folder: str) -> None:
    """Four batches of which the loop leaves out one: its update had begun with the third."""
    run = ech.evidence.RunDir(Path(folder))
    run.at_attempt(0)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in run.to_env().items():
            patch.setenv(key, value)
        model = torch.nn.Linear(3, 1)
        rows = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(8, 3), torch.zeros(8, 1))
        model, optimizer, loader = ech.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            ech.Loader(rows, global_batch=4, shuffle=False, accumulate=2),
            device=torch.device("cpu"),
            accumulate=2,
        )
        for _ in ech.epochs(model, 1):
            for number, (x, y) in enumerate(loader):
                with ech.window(model) as window:
                    window.log("rows", len(x), reduce="sum")
                    window.backward(((model(x) - y) ** 2).mean())
                    optimizer.step()
                if number == 2:
                    break


def test_what_an_unfinished_update_logged_is_left_out_with_it(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _left, str(tmp_path))
    assert [r["rows"] for r in read_lines(tmp_path / "metrics.jsonl") if "rows" in r] == [4]


def _loop(folder: str) -> None:
    ranks = torch.distributed.get_world_size()
    run = ech.evidence.RunDir(Path(folder) / f"loop-{ranks}")
    with pytest.MonkeyPatch.context() as patch:
        run.at_attempt(0)
        for key, value in run.to_env().items():
            patch.setenv(key, value)
        model = torch.nn.Linear(3, 1)
        rows = torch.utils.data.TensorDataset(torch.arange(30.0).reshape(10, 3), torch.zeros(10, 1))
        model, optimizer, loader = ech.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.0), ech.Loader(rows, global_batch=4, shuffle=False), layout="ddp"
        )
        for x, y in loader:
            with ech.window(model) as window:
                window.log("x", x.mean())
                window.log("most", x.max(), reduce="max")
                optimizer.zero_grad()
                window.backward(((model(x) - y) ** 2).mean())
                optimizer.step()


def test_a_loop_of_ones_own_logs_in_its_windows(ranks: Ranks, tmp_path: Path) -> None:
    """Ten rows in batches of four: the last has two."""
    ranks(2, _loop, str(tmp_path))
    records = [r for r in read_lines(tmp_path / "loop-2" / "metrics.jsonl") if "x" in r]
    rows = torch.arange(30.0).reshape(10, 3)
    assert [r["x"] for r in records] == [float(part.mean()) for part in rows.split(4)]
    assert [r["most"] for r in records] == [float(part.max()) for part in rows.split(4)]
