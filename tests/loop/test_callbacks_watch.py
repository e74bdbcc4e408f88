"""Callbacks that watch: what they write down, on which rank, and when."""

from __future__ import annotations

import csv
import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tqdm
from torch import nn

import echelon as ech
from echelon.common.errors import CallbackError, UsageError
from echelon.compat.torchtnt.framework.callbacks import (
    BaseCSVWriter,
    IterationTimeLogger,
    Lambda,
    ModuleSummary,
    ProgressReporter,
    SystemResourcesMonitor,
    TensorBoardParameterMonitor,
    ThroughputLogger,
    TimeWaitForBatchLogger,
    TQDMProgressBar,
    TrainProgressMonitor,
    times,
)
from echelon.compat.torchtnt.utils import resources
from echelon.compat.torchtnt.utils.loggers import InMemoryLogger
from echelon.compat.torchtnt.utils.module_summary import get_module_summary, get_summary_table, prune_module_summary
from echelon.loop.callbacks import LearningRateMonitor
from echelon.loop.callbacks.learning_rate import learning_rates
from echelon.observe.loggers import TensorBoardLogger
from echelon.parallel.state import partition
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.refusals import refused
from tests.kit.units import SEVERAL, Numbers, Regression, under_each

tqdm.tqdm.monitor_interval = 0  # no thread that watches progress bars, and stays


def logged(logger: InMemoryLogger, name: str) -> dict[int, float]:
    return {step: row[name] for step, row in logger.log_buffer.items() if name in row}


# --- learning rates


class TwoRates(Regression):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        first, second, *rest = module.parameters()
        groups = [{"params": [first], "name": "bias", "lr": 0.5}, {"params": [second]}, {"params": rest, "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize(("interval", "steps"), [("epoch", [0, 2]), ("step", [0, 1, 2, 3])])
def test_learning_rates_are_logged_by_group(interval: Any, steps: list[int]) -> None:
    loggers = [InMemoryLogger(), InMemoryLogger()]
    monitor = LearningRateMonitor(loggers, logging_interval=interval)
    unit = TwoRates(options=ech.UnitOptions(lr_interval="epoch"))
    ech.train(unit, [batch(2, i) for i in range(2)], max_epochs=2, callbacks=[monitor])
    for logger in loggers:
        rates = logged(logger, "optimizers/optimizer/bias:0")
        assert rates == {step: 0.5 if step < 2 else 0.25 for step in steps}
        assert [logged(logger, f"optimizers/optimizer/pg:{i}")[0] for i in range(2)] == [0.1, 0.2]
        assert logged(logger, "lr_schedulers/lr_scheduler/bias:0") == rates


def test_an_unknown_interval_is_refused() -> None:
    for kind in (LearningRateMonitor, SystemResourcesMonitor):
        with refused(CallbackError):
            kind(InMemoryLogger(), logging_interval="day")


# --- durations


class Durations(Lambda):
    """Puts known durations in place of the measured ones: 1 s, 2 s, ... a step, and 0.5 s for its batch."""

    def __init__(self, phase: str) -> None:
        def known(state: ech.State, unit: Any) -> None:
            timer = state.active_phase_state().iteration_timer  # type: ignore[union-attr]
            durations, waits = timer.series(f"{phase}_iteration_time"), timer.series("data_wait_time")
            durations[-1], waits[-1] = float(len(durations)), 0.5

        super().__init__(**{f"on_{phase}_step_end": known})


RUNS: dict[str, Any] = {
    "train": lambda unit, data, callbacks: ech.train(unit, data, max_epochs=1, callbacks=callbacks),
    "eval": lambda unit, data, callbacks: ech.evaluate(unit, data, callbacks=callbacks),
    "predict": lambda unit, data, callbacks: ech.predict(unit, data, callbacks=callbacks),
    "test": lambda unit, data, callbacks: ech.units.test(unit, data, callbacks=callbacks),
}


@pytest.mark.parametrize(
    ("phase", "name"),
    [
        ("train", "Train Iteration Time (seconds)"),
        ("eval", "Eval Iteration Time (seconds)"),
        ("predict", "Prediction Iteration Time (seconds)"),
        ("test", "Test Iteration Time (seconds)"),
    ],
)
def test_iteration_times_are_logged(phase: str, name: str) -> None:
    plain, averaged, later = InMemoryLogger(), InMemoryLogger(), InMemoryLogger()
    callbacks = [
        Durations(phase),
        IterationTimeLogger(plain),
        IterationTimeLogger(averaged, moving_avg_window=2),
        IterationTimeLogger(later, log_every_n_steps=2, warmup_steps=2),
    ]
    RUNS[phase](Numbers(), range(5), callbacks)
    assert logged(plain, name) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    assert logged(averaged, name) == {1: 1, 2: 1.5, 3: 2.5, 4: 3.5, 5: 4.5}
    assert logged(later, name) == {4: 4}


@pytest.mark.parametrize(("phase", "name"), [("train", "Train"), ("eval", "Eval"), ("predict", "Predict"), ("test", "Test")])
def test_waits_for_batches_and_throughput_are_logged(phase: str, name: str) -> None:
    """TorchTNT never logs the rate of a prediction's epoch."""
    logger = InMemoryLogger()
    rates = ThroughputLogger(logger, {"rows": 6, "tokens": 60}, log_every_n_steps=2)
    RUNS[phase](Numbers(), range(3), [Durations(phase), TimeWaitForBatchLogger(logger, log_every_n_steps=3), rates])
    assert logged(logger, f"Time Wait For Batch ({name})") == {3: 0.5}
    assert logged(logger, f"{name}: rows per second (step granularity)") == {2: 6 / 2.5}
    epochs = [logged(logger, f"{name}: {item} per second (epoch granularity)") for item in ("rows", "tokens")]
    assert list(epochs[0]) == [1] and epochs[1][1] == pytest.approx(10 * epochs[0][1])


def test_an_epochs_rate_counts_what_ran_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch that is resumed in its middle has a rate, of its rest."""
    now = [0.0]
    monkeypatch.setattr(times, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def second(state: ech.State, unit: Any) -> None:
        now[0] += 2.0

    unit, logger = Numbers(), InMemoryLogger()
    unit.train_progress.num_steps_completed = unit.train_progress.num_steps_completed_in_epoch = 2
    rates = ThroughputLogger(logger, {"rows": 8}, warmup_steps=100)
    ech.train(
        unit,
        ech.Loader(range(4), 1, options=ech.data.LoaderOptions(dp=(0, 1))),
        max_epochs=2,
        callbacks=[rates, Lambda(on_train_step_start=second)],
    )
    assert logged(logger, "Train: rows per second (epoch granularity)") == {1: 4, 2: 4} and len(unit.seen) == 6


def test_summary_writers_are_loggers_too(tmp_path: Path) -> None:
    written: list[Any] = []

    class Writer:
        def add_scalar(self, *args: Any) -> None:
            written.append(args)

    RUNS["train"](Numbers(), range(1), [Durations("train"), IterationTimeLogger(Writer())])
    assert written == [("Train Iteration Time (seconds)", 1.0, 1)]


def test_impossible_intervals_are_refused() -> None:
    for kind, options in (
        (IterationTimeLogger, {"moving_avg_window": 0}),
        (IterationTimeLogger, {"log_every_n_steps": 0}),
        (TimeWaitForBatchLogger, {"warmup_steps": -1}),
        (ThroughputLogger, {"throughput_per_batch": {}}),
        (ThroughputLogger, {"throughput_per_batch": {"rows": 0}}),
    ):
        with pytest.raises(UsageError):
            kind(InMemoryLogger(), **options)


def _watched_by_rank_0_only() -> list[str]:
    logger = InMemoryLogger()
    rates = ThroughputLogger(logger, {"rows": 1})
    RUNS["train"](Numbers(), range(2), [IterationTimeLogger(logger), TimeWaitForBatchLogger(logger), rates])
    SystemResourcesMonitor(logger).write_system_stats("epoch", 1)
    bar = io.StringIO()
    RUNS["train"](Numbers(), range(2), [TQDMProgressBar(file=bar)])
    return [*sorted({name.split()[0] for row in logger.log_buffer.values() for name in row}), str(bool(bar.getvalue()))]


def test_only_rank_0_watches(ranks: Ranks) -> None:
    first, second = ranks(2, _watched_by_rank_0_only)
    assert {"Time", "Train", "Train:", "cpu_percent", "True"} <= set(first) and second == ["False"]


# --- progress


def test_progress_bars_show_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is resumed in its middle: TorchTNT has no bar for it."""
    unit, file = Numbers(), io.StringIO()
    unit.train_progress.num_steps_completed = unit.train_progress.num_steps_completed_in_epoch = 3
    loaders = [ech.Loader(range(n), 1, options=ech.data.LoaderOptions(dp=(0, 1))) for n in (5, 2)]
    ech.fit(unit, *loaders, max_epochs=2, callbacks=[TQDMProgressBar(file=file, mininterval=0)])
    last = [part.split("\r")[-1] for part in file.getvalue().split("\n")]
    shown = [f"{line.split(':')[0]} {line.split('|')[2].split()[0]}" for line in last if line]
    assert shown == ["Train Epoch 0 5/5", "Eval Epoch 0 2/2", "Train Epoch 1 5/5", "Eval Epoch 1 2/2"]
    first = [part for part in file.getvalue().split("\n")[0].split("\r") if "|" in part]
    assert "| 3/5 " in first[0] and "| 4/5 " in first[1]


def test_a_bar_is_drawn_at_its_rate_and_closed_at_an_exception() -> None:
    drawn: list[int] = []

    class Bar(tqdm.tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            drawn.append(int(n or 0))
            return super().update(n)

    bar = TQDMProgressBar(refresh_rate=2, file=io.StringIO())
    bar._tqdm = Bar  # type: ignore[assignment]
    ech.predict(Numbers(), iter(range(5)), callbacks=[bar])
    assert drawn == [2, 2, 1]
    with pytest.raises(ZeroDivisionError):
        ech.predict(Numbers(), range(5), callbacks=[bar, Lambda(on_predict_step_end=lambda *_: 1 / 0)])
    assert not bar._bars
    with pytest.raises(UsageError):
        TQDMProgressBar(refresh_rate=0)


def test_tqdm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)
    with refused(UsageError):
        TQDMProgressBar()


def test_steps_over_epochs() -> None:
    logger = InMemoryLogger()
    ech.train(Numbers(), [1, 2, 3], max_epochs=2, callbacks=[TrainProgressMonitor(logger)])
    assert logged(logger, "Training steps completed vs epochs") == {0: 0, 1: 3, 2: 6}


def test_the_reporter_logs_every_hook(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "echelon.compat.torchtnt.framework.callbacks.progress_reporter"):
        ech.fit(Numbers(), [1], [1], max_epochs=1, callbacks=[ProgressReporter()])
    moments = ("start", "epoch_start", "step_start", "step_end")
    order = [f"on_train_{m}" for m in moments] + ["on_train_epoch_end"] + [f"on_eval_{m}" for m in moments]
    order += ["on_eval_epoch_end", "on_eval_end", "on_train_end"]
    assert [message.split(". ")[0] for message in caplog.messages] == [f"Progress Reporter: rank 0 at {hook}" for hook in order]
    assert (
        "Train progress: completed epochs: 0, completed steps: 1" in caplog.messages[3] and "Eval progress" in caplog.messages[3]
    )


# --- resources


def test_the_machines_use_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, each = InMemoryLogger(), InMemoryLogger()
    watch = [SystemResourcesMonitor(logger), SystemResourcesMonitor([each], logging_interval="step")]
    ech.fit(Numbers(), [1, 2], [1], max_epochs=1, callbacks=watch)
    assert list(logger.log_buffer) == [0] and list(each.log_buffer) == [0, 1]  # by each phase's own steps
    row = logger.log_buffer[0]
    assert row["worker_rss"] > 1e6 and row["worker_cpu_time_user"] > 0 and 0 < row["cpu_vm_percent"] <= 100


def test_nvidia_smi_is_asked_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resources.gpu_stats(0) == {}
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ "$3" = "--id=GPU-1" ] || exit 6\necho "50, 25, [N/A], 1000, 9000, 60, 70"\n')
    smi.chmod(0o755)
    assert resources.gpu_stats("GPU-1") == {
        "utilization_gpu_percent": 50,
        "utilization_memory_percent": 25,
        "memory_used_mb": 1000,
        "memory_free_mb": 9000,
        "temperature_gpu_celsius": 60,
        "temperature_memory_celsius": 70,
    }
    assert resources.gpu_stats(7) == {}


# --- parameters


def _histograms(layout: str) -> dict[str, Any]:
    written: dict[str, Any] = {}

    class Writer:
        def add_histogram(self, name: str, values: torch.Tensor, global_step: int) -> None:
            written[name] = (tuple(values.shape), global_step)

    unit = Regression(layout=layout)
    ech.train(unit, [batch(2, 0)], max_epochs=1, callbacks=[TensorBoardParameterMonitor(Writer())])
    return written


def _histograms_of_each() -> list[dict[str, Any]]:
    return [_histograms("ddp"), _histograms("fsdp")]


def test_whole_parameters_are_drawn_whatever_the_strategy(ranks: Ranks) -> None:
    want = {f"Parameters/module/{name}": (tuple(p.shape), 1) for name, p in net().named_parameters()}
    assert ranks(2, _histograms_of_each) == [[want, want], [{}, {}]]
    with refused(UsageError):
        TensorBoardParameterMonitor(InMemoryLogger())


# --- summaries


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lazy = nn.BatchNorm1d(4), nn.LazyLinear(2)


def test_parameters_bytes_and_operations_are_counted() -> None:
    module = net(dtype=torch.float32)
    module.first.bias.requires_grad_(False)
    summary = get_module_summary(module, (torch.randn(3, 4),))
    first = summary.submodule_summaries["first"]
    assert (summary.module_name, summary.module_type, first.module_name, first.module_type) == ("", "Net", "first", "Linear")
    assert summary.num_parameters == sum(p.numel() for p in module.parameters())
    assert (first.num_parameters, first.num_trainable_parameters, first.size_bytes) == (40, 32, 160)
    assert first.flops_forward == 3 * 4 * 8 and first.flops_backward == 3 * 4 * 8  # its input has no gradient
    assert summary.flops_forward == 3 * (4 * 8 + 4 * 8 * 8 + 8) and summary.flops_backward == 2 * summary.flops_forward - 96
    blocks = summary.submodule_summaries["blocks"]
    assert blocks.flops_forward == 3 * 4 * 8 * 8 and blocks.in_size == "?"
    block = blocks.submodule_summaries["blocks.0"]
    assert block.submodule_summaries["blocks.0.3"].flops_backward == 0
    assert (first.in_size, first.out_size, block.out_size) == ([3, 4], [3, 8], [3, 8])
    assert 0 < first.forward_elapsed_time_ms < summary.forward_elapsed_time_ms  # type: ignore[operator]
    lazy = get_module_summary(Lazy(), (torch.ones(1, 4),))
    assert lazy.has_uninitialized_param
    for name, value, what in (
        ("num_parameters", 8, "number of parameters"),
        ("size_bytes", 72, "byte sizes"),
        ("flops_forward", "?", "number of FLOPs"),
    ):
        with pytest.warns(UserWarning, match=f"UninitializedParameter was found. Thus, the total {what} detected may be"):
            assert getattr(lazy, name) == value


def test_looking_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    module(torch.randn(3, 4)).sum().backward()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    gradients, stream = [p.grad for p in module.parameters()], torch.get_rng_state()
    values = [g.clone() for g in gradients if g is not None]
    get_module_summary(module, (torch.randn(3, 4),))
    stream_after = torch.get_rng_state()
    torch.set_rng_state(stream)
    torch.randn(3, 4)
    assert torch.equal(stream_after, torch.get_rng_state())
    assert all(torch.equal(v, module.state_dict()[k]) for k, v in before.items())
    assert all(p.grad is g and torch.equal(g, v) for p, g, v in zip(module.parameters(), gradients, values, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_the_table_has_a_line_for_each_submodule_to_its_depth() -> None:
    summary = get_module_summary(net(dtype=torch.float32))
    lines = get_summary_table(summary).splitlines()
    assert len(lines) == 14 + 2 and "Forward FLOPs" not in lines[0] and set(lines[1]) == {"-"}
    assert [cell.strip() for cell in lines[2].split(" | ")] == ["", "Net", "337", "337", "1.3 K", "No"]
    assert len({len(line) for line in lines}) == 1 and repr(summary) == str(summary)
    assert "| 1348 " in get_summary_table(summary, human_readable_nums=False)
    prune_module_summary(summary, max_depth=2)
    assert [line.split()[0] for line in str(summary).splitlines()[3:]] == ["first", "blocks", "last"]
    with pytest.raises(UsageError):
        prune_module_summary(summary, max_depth=0)


def test_modules_are_summarised_as_the_run_starts(caplog: pytest.LogCaptureFixture) -> None:
    given: list[Any] = []
    inputs = {"module": ((batch(2, 0)[0],), {})}
    ech.train(Regression(), [batch(2, 0)], max_epochs=1, callbacks=[ModuleSummary(2, given.append, inputs)])
    assert list(given[0][0].submodule_summaries) == ["first", "blocks", "last"] and given[0][0].flops_forward > 0
    with caplog.at_level(logging.INFO, "echelon.compat.torchtnt.framework.callbacks.module_summary"):
        ech.evaluate(Regression(), [batch(2, 0)], callbacks=[ModuleSummary(max_depth=1)])
    assert "Net" in caplog.messages[0] and "first" not in caplog.messages[0]
    with refused(UsageError):
        ech.evaluate(Regression(), [batch(2, 0)], callbacks=[ModuleSummary(module_inputs={"model": ((), {})})])


def _summary_under(layout: str) -> tuple[int, int, float]:
    """Of the run's module: its parameters, its operations, and what looking at it changed in training."""
    given: list[Any] = []
    inputs = {"module": ((batch(2, 0)[0],), {})}
    trained = []
    for watching in ([ModuleSummary(process_fn=given.append, module_inputs=inputs)], []):
        unit = Regression(layout=layout)
        ech.train(unit, [batch(2, i) for i in range(3)], max_epochs=1, callbacks=watching)
        trained.append(whole(unit.module))
    return given[0][0].num_parameters, given[0][0].flops_forward, largest_difference(*trained)


@pytest.mark.parametrize("layouts", SEVERAL)
def test_a_summary_is_of_the_whole_module_and_changes_nothing_under_any_strategy(ranks: Ranks, layouts: list[str]) -> None:
    whole_module = get_module_summary(net(), batch(2, 0)[:1])
    for found in ranks(2, under_each, layouts, _summary_under):
        assert found == dict.fromkeys(layouts, (whole_module.num_parameters, whole_module.flops_forward, 0.0))


# --- predictions as a table


class Doubles(BaseCSVWriter):
    def get_step_output_rows(self, state: ech.State, unit: Any, step_output: Any) -> list[Any]:
        if step_output == 0:
            return []
        return [step_output, 2 * step_output] if step_output == 1 else [[step_output, 2 * step_output], ["again", step_output]]


def table(path: Path, delimiter: str = "\t") -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file, delimiter=delimiter))


def test_predictions_are_written_with_one_header(tmp_path: Path) -> None:
    writer, lines = Doubles(["number", "double"], str(tmp_path / "out")), []
    count = Lambda(on_predict_step_end=lambda state, unit: lines.append(len(table(writer.path))))
    ech.predict(Numbers(), [0, 1], callbacks=[writer, count])
    assert lines == [1, 2]  # so that a kill leaves what was predicted
    with pytest.raises(ZeroDivisionError):
        ech.predict(Numbers(), [2, 3], callbacks=[writer, Lambda(on_predict_step_end=lambda *_: 1 / 0)])
    assert table(tmp_path / "out" / "predictions.csv") == [["number", "double"], ["1", "2"], ["2", "4"], ["again", "2"]]


def _predict_on_a_rank(folder: str) -> str:
    rank = torch.distributed.get_rank()
    writer = Doubles(["number", "double"], folder, delimiter=",", filename="p.csv")
    ech.predict(Numbers(), [rank + 5], callbacks=[writer])
    return writer.path.name


def test_each_rank_writes_predictions_to_a_file_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _predict_on_a_rank, str(tmp_path)) == ["p.rank0.csv", "p.rank1.csv"]
    for rank in range(2):
        number = str(rank + 5)
        rows = [["number", "double"], [number, str(2 * (rank + 5))], ["again", number]]
        assert table(tmp_path / f"p.rank{rank}.csv", ",") == rows


def _rates() -> list[str]:
    module = nn.Linear(64, 1)
    optimizer = torch.optim.SGD([{"params": [module.weight], "name": "w"}, {"params": [module.bias], "name": "b"}], lr=0.1)
    divided = partition.Partition(optimizer, None)
    assert divided.groups
    return sorted(learning_rates(optimizer, "o"))


def test_rates_of_groups_that_other_ranks_own_are_logged(ranks: Ranks) -> None:
    assert ranks(2, _rates) == [["o/b:0", "o/w:0"]] * 2


def test_parameters_that_are_not_finite_are_named_and_end_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unit, log = Regression(), TensorBoardLogger(str(tmp_path))
    with torch.no_grad():
        next(unit.module.parameters()).fill_(float("nan"))
    TensorBoardParameterMonitor(log).on_train_epoch_end(ech.State(entry_point=ech.units.EntryPoint.TRAIN), unit)
    log.close()
    assert "module.first.weight has 32 values that are not finite" in caplog.text


class Outputs(BaseCSVWriter):
    def get_step_output_rows(self, state: Any, unit: Any, step_output: Any) -> Any:
        return [[float(value)] for value in step_output]


def _predicts(folder: str) -> None:
    class First(nn.Module):
        def forward(self, data: Any) -> torch.Tensor:
            return data[0][:, 0]  # type: ignore[no-any-return]

    rows = torch.utils.data.TensorDataset(torch.arange(9.0).reshape(9, 1))
    ech.predict(
        ech.units.AutoPredictUnit(module=First()), ech.Loader(rows, 4, shuffle=False), callbacks=[Outputs(["x"], folder, ",")]
    )


def test_each_sample_is_written_once_though_ranks_share_unevenly(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _predicts, str(tmp_path))
    lines = [line for path in tmp_path.glob("*.csv") for line in path.read_text().splitlines()[1:]]
    assert sorted(map(float, lines)) == list(range(9))
