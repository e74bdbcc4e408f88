"""Numbers of the user's own where ranks share samples: they are those of one process, and counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.common.errors import RanksDisagreeError
from echelon.contracts.events import read_lines
from tests.conftest import Ranks
from tests.kit.language import WORDS, Language
from tests.kit.language import Unit as LanguageUnit
from tests.kit.models import batch, net
from tests.kit.own_loops import own_loop, told
from tests.kit.run_folders import recorded
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks


class Logs(Regression):
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


def _fit(folder: str, layout: Any) -> None:
    """Batches of two shapes, so that a pipeline learns what its stages send in the middle of the training, too."""
    batches = [batch(rows, n) for n, rows in enumerate((3, 3, 3, 5, 5, 3))]
    unit = Logs(layout=layout, accumulate=2)
    with recorded(folder):
        ech.fit(unit, batches, batches[2:5], max_epochs=1)


def _numbers(folder: Path) -> list[dict[str, float]]:
    names = {*NAMES, *(f"eval_{name}" for name in NAMES)}
    return [{n: r[n] for n in r if n in names} for r in read_lines(folder / "metrics.jsonl")]


@pytest.mark.full
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_ranks_that_share_samples_log_what_one_process_does(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    _fit(str(tmp_path / "one"), "none")
    ranks(2, _fit, str(tmp_path / "two"), LAYOUTS[layout])
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
            assert len(told_of) == 1 and "test_logged_parallel.py:" in told_of[0]
    for read in WHOLE if layout == "fsdp" else ():
        assert ranks(2, _told_of_reading, read, layout) == [[], []]
    assert ranks(2, _told_of_reading, "norm", "ddp") == [[], []]
