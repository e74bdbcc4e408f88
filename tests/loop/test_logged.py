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
from tests.kit.language import WORDS, Language
from tests.kit.language import Unit as LanguageUnit
from tests.kit.models import batch, net
from tests.kit.own_loops import own_loop, told
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


# --- where ranks share samples: numbers are those of one process, and counted once


class LogsAround(Regression):
    """Logs before and after the module's call, to which a pipeline's last stage alone comes, and in hooks, as all ranks do."""

    def compute_loss(self, state: Any, data: Any) -> Any:
        x, y = data
        state.log("batches", 1.0, reduce="sum")
        state.log("x", x.mean())
        loss, out = super().compute_loss(state, data)
        state.log("out", out.mean())
        state.log("near", ((out - y).abs() < 1).sum(), reduce="sum")
        state.log("rows", len(x), weight=1, reduce="sum")
        state.log("most", out.max(), reduce="max")
        if len(x) == 5:  # in the second update the last micro-batch alone
            state.log("large", out.mean())
        return loss, out

    def on_train_step_end(self, state: Any, *results: Any) -> None:
        state.log("steps", 1.0, reduce="sum")

    def on_eval_step_end(self, state: Any, *results: Any) -> None:
        state.log("seen", 1.0, reduce="sum")


NAMES = ("batches", "x", "out", "near", "rows", "most", "large", "steps", "seen", "target", "targets")
# By layout, whose ranks share all samples.
LAYOUTS = {
    "1f1b": ech.Layout(pp=2, stages=["blocks.1"], schedule="1f1b"),
    "interleaved": ech.Layout(pp=2, stages=["blocks.0", "blocks.1", "last"], schedule="interleaved"),
    "tp": ech.Layout(tp=2),
}


def _fit_alike(folder: str, layout: Any) -> None:
    """Batches of two shapes, so that a pipeline learns what its stages send in the middle of the training, too."""
    batches = [batch(rows, n) for n, rows in enumerate((3, 3, 3, 5, 5, 3))]
    unit = LogsAround(layout=layout, accumulate=2)
    with recorded(folder):
        ech.fit(unit, batches, batches[2:5], max_epochs=1)


def _numbers(folder: Path) -> list[dict[str, float]]:
    names = {*NAMES, *(f"eval_{name}" for name in NAMES)}
    return [{n: r[n] for n in r if n in names} for r in read_lines(folder / "metrics.jsonl")]


@pytest.mark.full
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_ranks_that_share_samples_log_what_one_process_does(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    _fit_alike(str(tmp_path / "one"), "none")
    ranks(2, _fit_alike, str(tmp_path / "two"), LAYOUTS[layout])
    ours, theirs = _numbers(tmp_path / "one"), _numbers(tmp_path / "two")
    assert [each["rows"] for each in ours if "rows" in each] == [6, 8, 8]
    assert ["large" in each for each in ours if "rows" in each] == [False, True, True]
    assert [each["eval_seen"] for each in ours if "eval_seen" in each] == [3]
    # A pipeline calls the hooks of all steps after the update, so that what they log stands with a later one.
    for records in (ours, theirs):
        assert sum(each.pop("steps", 0) for each in records) == 6
    ours, theirs = ([each for each in records if each] for records in (ours, theirs))
    for one, two in zip(ours, theirs, strict=True):
        assert two == pytest.approx(one, rel=1e-11)


class Counts(Regression):
    """Metrics of its own, in the loss; logged there, one's `compute` meets all ranks, and the first stage's would not come."""

    def __init__(self, logs: bool = False, **options: Any) -> None:
        from torchmetrics import MeanMetric, SumMetric

        super().__init__(**options)
        self.rows, self.mean, self.logs = SumMetric(sync_on_compute=False), MeanMetric(sync_on_compute=False), logs

    def compute_loss(self, state: Any, data: Any) -> Any:
        loss, out = super().compute_loss(state, data)
        self.rows.update(len(data[0]))
        self.mean.update(out.detach().mean().float(), weight=len(data[0]))
        if self.logs:
            state.log("mean", self.mean)
        return loss, out


def _counted(layout: Any) -> tuple[list[tuple[float, float]], str]:
    batches = [batch(rows, n) for n, rows in enumerate((3, 3, 3, 5, 5, 3))]
    unit = Counts(layout=layout, accumulate=2)
    ech.train(unit, batches, max_epochs=1)
    found = [(float(unit.rows.compute()), float(unit.mean.compute()))]
    unit.rows.reset(), unit.mean.reset()
    ech.evaluate(unit, batches)
    found.append((float(unit.rows.compute()), float(unit.mean.compute())))
    try:
        ech.evaluate(Counts(True, layout=layout), [batch(3, 0)])
    except RanksDisagreeError as error:
        return found, str(error)
    return found, ""


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_metrics_of_the_last_stage_count_each_sample_once_and_are_not_logged_by_it(ranks: Ranks) -> None:
    ((want, said),) = ranks(1, _counted, "none")
    assert said == ""
    (first, told_first), (last, told_last) = ranks(2, _counted, LAYOUTS["1f1b"])
    assert [rows for rows, _ in first] == [0, 0]
    for got, one in zip(last, want, strict=True):
        assert got[0] == one[0] == 22 and got[1] == pytest.approx(one[1], rel=1e-6)
    for error in (told_first, told_last):
        assert "in the eval epoch: rank 0: nothing, rank 1: mean (a metric)." in error and "on_eval_step_end" in error


class Rows(Regression):
    """With weights of its own."""

    def compute_loss(self, state: Any, data: Any) -> Any:
        x = data[0]
        state.log("x", x.mean(), weight=len(x))
        state.log("rows", len(x), weight=len(x), reduce="sum")
        state.log("most", x.max(), weight=1, reduce="max")
        return super().compute_loss(state, data)

    def on_train_epoch_end(self, state: Any) -> None:
        state.log("ranks", 1, weight=1, reduce="sum")

    def on_predict_step_end(self, state: Any, data: Any, *results: Any) -> None:
        state.log("rows", len(data), reduce="sum")


def _padded(folder: str) -> None:
    """33 rows in batches of 32: the last has one, on rank 0, and rank 1 a copy of it that fills up."""
    x = torch.arange(33.0, dtype=torch.float64).view(33, 1).repeat(1, 4)
    rows = torch.utils.data.TensorDataset(x, torch.zeros(33, 1, dtype=torch.float64))
    unit, loader = Rows(layout="ddp", lr=1e-6), ech.Loader(rows, global_batch=32, shuffle=False)
    with recorded(folder):
        ech.fit(unit, loader, ech.Loader(rows, global_batch=32, shuffle=False), max_epochs=1)


def test_padding_counts_nothing_whatever_its_weight(ranks: Ranks, tmp_path: Path) -> None:
    """After the epoch's last batch, which is padding on one rank, both count again."""
    ranks(2, _padded, str(tmp_path))
    records = list(read_lines(tmp_path / "metrics.jsonl"))
    found = [(r["x"], r["rows"], r["most"]) for r in records if "x" in r]
    assert found == [(15.5, 32, 31.0), (32.0, 1, 32.0)]
    assert [(r["eval_x"], r["eval_rows"], r["eval_most"]) for r in records if "eval_x" in r] == [(16.0, 33, 32.0)]
    assert [r["ranks"] for r in records if "ranks" in r] == [2]


def _predicted(folder: str, layout: Any) -> None:
    loader: Any = [batch(3, 0)[0], batch(5, 1)[0]]
    if layout == "fsdp":  # one sample, and a rank that has none
        rows = torch.utils.data.TensorDataset(torch.zeros(1, 4, dtype=torch.float64))
        loader = ech.Loader(rows, global_batch=2, shuffle=False, collate_fn=lambda rows: torch.stack([x for (x,) in rows]))
    with recorded(folder):
        ech.predict(Rows(layout=layout), loader)


@pytest.mark.parametrize("layout", ["1f1b", "tp", "fsdp"])
def test_predictions_of_ranks_that_share_samples_or_have_none_count_once(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    ranks(2, _predicted, str(tmp_path), LAYOUTS.get(layout, layout))
    (record,) = read_lines(tmp_path / "metrics.jsonl")
    assert record["predict_rows"] == (1 if layout == "fsdp" else 8)


class Words(LanguageUnit):
    def compute_loss(self, state: Any, data: Any) -> Any:
        made = super().compute_loss(state, data)
        there = data["targets"] != -100
        state.log("target", data["targets"][there].double().mean())
        state.log("targets", there.sum(), reduce="sum")
        state.log("most", data["words"].max(), reduce="max")
        return made


def _fit_words(folder: str, layout: str) -> None:
    """The mean weighs by targets, of which the parts of a sequence have more and fewer."""
    torch.manual_seed(0)
    batches = []
    for n in range(4):
        tokens = torch.arange(32).view(2, 16) * (n + 1) % WORDS
        batches.append({"words": tokens, "targets": torch.where(tokens % (n + 2) == 0, -100, tokens)})
    unit = Words("SGD", Language(1), layout=layout, options=ech.UnitOptions(device=torch.device("cpu")), accumulate=2)
    with recorded(folder):
        ech.fit(unit, batches, batches[:3], max_epochs=1)


@pytest.mark.full
def test_parts_of_sequences_log_what_whole_ones_do(ranks: Ranks, tmp_path: Path) -> None:
    _fit_words(str(tmp_path / "one"), "none")
    ranks(2, _fit_words, str(tmp_path / "two"), "cp=2")
    ours, theirs = _numbers(tmp_path / "one"), _numbers(tmp_path / "two")
    assert sum("target" in each or "eval_target" in each for each in ours) == 3 and len(ours) == len(theirs)
    for one, two in zip(ours, theirs, strict=True):
        assert two == pytest.approx(one, rel=1e-11)


class LogsWeights(Regression):
    """Logs numbers of a parameter, of which each rank has a part."""

    def compute_loss(self, state: Any, data: Any) -> Any:
        loss, out = super().compute_loss(state, data)
        weight = self.module.blocks[0][0].weight
        state.log("norm", weight.norm())
        state.log("greatest", weight.max(), reduce="max")
        state.log("least", weight.min(), reduce="min")
        state.log("mean", weight.mean(), reduce="max")
        return loss, out


def _weights(layout: str, folder: str) -> list[dict[str, Any]]:
    with recorded(f"{folder}/{layout}"):
        unit = LogsWeights(layout=layout)
        ech.train(unit, [batch(4, unit.prepared.data.rank)], max_epochs=1)
    if torch.distributed.get_rank():
        return []
    return [each for each in read_lines(Path(folder, layout, "metrics.jsonl")) if "norm" in each]


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_numbers_of_a_split_parameter_are_those_of_the_whole(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    weight = net().blocks[0][0].weight.detach()
    (record,), _ = ranks(2, _weights, layout, str(tmp_path))
    want = {"norm": weight.norm(), "greatest": weight.max(), "least": weight.min(), "mean": weight.mean()}
    assert {name: record[name] for name in want} == pytest.approx({name: float(each) for name, each in want.items()})


READS: dict[str, Any] = {
    "norm": lambda model: model.blocks[0][0].weight.norm().item(),
    "most": lambda model: float(model.blocks[0][0].weight.abs().max()),
    "sum": lambda model: float(sum(p.sum() for p in model.blocks[0][0].parameters())),
    "is": lambda model: bool((model.blocks[0][0].weight > 1e9).any()),
}
WHOLE: dict[str, Any] = {
    "gathered": lambda model: model.blocks[0][0].weight.norm().full_tensor().item(),
    "of all": lambda model: torch.nn.utils.get_total_norm(list(model.parameters())).item(),
    "plain": lambda model: float(torch.ones(3).sum()) and int(torch.tensor(3)) and bool(torch.ones(1)),
}


def _told_of_reading(read: str, layout: str) -> list[str]:
    rows = list(zip(*batch(16, 0), strict=True))
    module, read_by = net(), {**READS, **WHOLE}[read]
    if layout == "ddp":
        module, read_by = torch.nn.Linear(4, 1).double(), lambda model: float(next(model.parameters()).norm())
    with told() as texts:
        own_loop(module, ech.Loader(rows, 4), layout=layout, after=read_by)
    return [text for text in texts if "full_tensor" in text]


@pytest.mark.full
@pytest.mark.fresh_ranks
@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_a_number_read_of_split_parameters_between_steps_is_told_once_with_its_line(ranks: Ranks, layout: str) -> None:
    for read in READS:
        for told_of in ranks(2, _told_of_reading, read, layout):
            assert len(told_of) == 1 and "test_logged.py:" in told_of[0]
    for read in WHOLE if layout == "fsdp" else ():
        assert ranks(2, _told_of_reading, read, layout) == [[], []]
    assert ranks(2, _told_of_reading, "norm", "ddp") == [[], []]


@pytest.mark.parametrize(
    "wrong",
    [
        {"numbers": []},
        {"numbers": {"x": "1"}},
        {"totals": {"x": {}}},
        {"totals": {"x": {"mean": [[1.0], []]}}},
        {"totals": {"x": {"median": [[1.0, 1.0], []]}}},
        {"totals": {"x": {"max": [[], [1.0]]}}},
        {"totals": {"x": {"max": [[], [1.0, 1.0], []]}}},
        {"metrics": {"x": 1}},
    ],
)
def test_logged_numbers_of_a_checkpoint_are_parsed_strictly(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"numbers": {"x": 1.0}, "totals": {"y": {"mean": [[1.0, 2.0], []]}}, "metrics": {"z": "z"}}
    Logged().load_state_dict(right, {})
    with pytest.raises(ValueError, match=r"must be|unpack"):
        Logged().load_state_dict(right | wrong, {})
