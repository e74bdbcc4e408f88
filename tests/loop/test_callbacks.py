"""Callbacks: those that end a run do so on all ranks, whatever one of them sees; those that watch; those around a run."""

from __future__ import annotations

import gc
import io
import logging
import math
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import tqdm
from torch import nn

import echelon as ech
from echelon import callbacks
from echelon.callbacks import EarlyStopping, GarbageCollector, LearningRateMonitor, PyTorchProfiler
from echelon.common.errors import CallbackError, UsageError
from echelon.compat.torchtnt.framework import callbacks as theirs
from echelon.compat.torchtnt.framework.callbacks import (
    Lambda,
    ModuleSummary,
    TQDMProgressBar,
)
from echelon.compat.torchtnt.utils.loggers import InMemoryLogger
from echelon.compat.torchtnt.utils.module_summary import get_module_summary, get_summary_table, prune_module_summary
from echelon.loop.callbacks.early_stopping import EarlyStopChecker
from echelon.loop.callbacks.monitors import learning_rates
from echelon.parallel.state import partition
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.refusals import refused
from tests.kit.units import SEVERAL, Hooks, Numbers, Regression, under_each

pytestmark = pytest.mark.standing_ranks


def rank() -> int:
    return torch.distributed.get_rank()


def test_only_what_may_stop_costs_a_message_between_ranks_at_each_step() -> None:
    kinds = [getattr(room, name) for room in (callbacks, theirs) for name in room.__all__]
    watching = {k for k in kinds if issubclass(k, ech.Callback)} - {EarlyStopping, Lambda}
    assert not [k.__name__ for k in watching if k.may_stop]
    checker = EarlyStopChecker("min", 1)
    assert [EarlyStopping("a", checker, interval).may_stop for interval in ("step", "epoch")] == [True, False]


# --- EarlyStopChecker


@pytest.mark.parametrize(
    ("options", "values", "stops_at"),
    [
        ({"patience": 2}, [3, 2, 2, 1, 1, 1], 5),
        ({"patience": 2, "mode": "max"}, [1, 2, 2, 3, 2, 1], 5),
        ({"patience": 1, "min_delta": 0.5}, [3, 2, 1.6], 2),
        ({"patience": 1, "min_delta": 0.1, "threshold_mode": "rel"}, [100, 89, 81], 2),
        ({"patience": 1, "min_delta": 0.1, "threshold_mode": "rel"}, [-1.0, -1.2, -1.25], 2),
        ({"patience": 1, "min_delta": 0.1, "threshold_mode": "rel"}, [-1.0, -0.95], 1),  # TorchTNT: an improvement
        ({"patience": 9}, [1, math.nan], 1),
        ({"patience": 2, "check_finite": False}, [1, math.nan, math.inf], 2),
        ({"patience": 9, "stopping_threshold": 0.0}, [1, 0.5, -0.1], 2),
        ({"patience": 9, "divergence_threshold": 10}, [1, 10, 11], 2),
        ({"patience": 1}, [torch.tensor([3.0]), torch.tensor(2), 1], None),
    ],
)
def test_the_checker_stops_when_it_should(options: dict[str, Any], values: list[Any], stops_at: int | None) -> None:
    checker = EarlyStopChecker(**{"mode": "min", **options})
    answers = [checker.check(value) for value in values]
    assert answers.index(True) == stops_at if stops_at is not None else not any(answers)


def test_the_checker_refuses_what_cannot_work() -> None:
    for options in ({"mode": "least"}, {"patience": -1}, {"min_delta": -0.1}, {"threshold_mode": "both"}):
        with pytest.raises(UsageError):
            EarlyStopChecker(**{"mode": "min", "patience": 1, **options})
    with refused(CallbackError):
        EarlyStopChecker("min", 1).check(torch.zeros(2))


# --- EarlyStopping


def test_training_stops_when_the_number_no_longer_improves() -> None:
    unit = Numbers()
    stopping = EarlyStopping("value", EarlyStopChecker("min", patience=2), interval="step")
    ech.train(unit, [5, 4, 4, 4, 1, 1], max_epochs=1, callbacks=[stopping])
    assert unit.seen == [5, 4, 4, 4]


def test_interval_phase_and_frequency_say_what_is_checked() -> None:
    checks: dict[tuple[str, str, int], list[Any]] = {}

    class Recording(EarlyStopChecker):
        def check(self, val: Any) -> bool:
            checks[key].append(val)
            return False

    for key in [("step", "train", 2), ("epoch", "train", 1), ("step", "eval", 1), ("epoch", "eval", 2)]:
        checks[key] = []
        interval, phase, every = key
        stopping = EarlyStopping("value", Recording("min", 1), interval, phase, every)  # type: ignore[arg-type]
        ech.fit(Numbers(), [1, 2, 3], [7, 8], max_epochs=2, callbacks=[stopping])
    assert checks == {
        ("step", "train", 2): [2, 1, 3],
        ("epoch", "train", 1): [3, 3],
        ("step", "eval", 1): [7, 8, 7, 8],
        ("epoch", "eval", 2): [8],
    }


def _stop_early(phase: str, interval: str) -> tuple[int, int]:
    """Rank 0 sees 5, 4, 4, 4, ...; rank 1 sees what would stop at once."""
    numbers = [5, 4, 4, 4, 4, 4] if rank() == 0 else [1, 9, 9, 9, 9, 9]
    unit = Numbers()
    stopping = EarlyStopping("value", EarlyStopChecker("min", 2), interval, phase)  # type: ignore[arg-type]
    if interval == "epoch":
        epochs = iter(numbers)

        class Epoch(Numbers):
            def on_train_epoch_end(self, state: ech.State) -> None:
                self.value = next(epochs)

        unit = Epoch()
        numbers = [0]
    if phase == "train":
        ech.train(unit, numbers, max_epochs=6 if interval == "epoch" else 1, callbacks=[stopping])
    else:
        ech.fit(unit, [0], numbers, max_epochs=9, callbacks=[stopping])
    return unit.train_progress.num_steps_completed, stopping.checker._patience_count


def _stop_early_in_each_way() -> list[tuple[int, int]]:
    return [_stop_early(*kind) for kind in (("train", "step"), ("train", "epoch"), ("eval", "step"))]


@pytest.mark.full
def test_rank_0_decides_and_all_ranks_remember_the_same(ranks: Ranks) -> None:
    # The message that cuts an evaluation short is read one step later.
    assert ranks(2, _stop_early_in_each_way) == [[(4, 2), (4, 2), (1, 3)]] * 2


class Broken(Numbers):
    @property
    def latest(self) -> float:
        return {}["nothing"]  # type: ignore[no-any-return]


def _not_monitored() -> None:
    for unit, name, phase, interval in (
        (Numbers(), "other", "train", "epoch"),  # which rank 1 alone has
        (Numbers(), "other", "eval", "step"),
        (Numbers(), "value", "train", "step"),  # a text
        (Broken(), "latest", "train", "epoch"),
    ):
        if rank() == 1 and name == "other":
            unit.other = 1.0  # type: ignore[attr-defined]
        stopping = EarlyStopping(name, EarlyStopChecker("min", 2), interval, phase)  # type: ignore[arg-type]
        with refused(CallbackError):
            ech.fit(unit, ["two", "numbers"], [1, 2, 3], max_epochs=2, callbacks=[stopping])
    with refused(CallbackError):
        _stops_by_what_was_logged("acuracy", "max")


def test_what_is_no_number_of_the_units_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    """In TorchTNT rank 0 raises, and the others wait for it."""
    ranks(2, _not_monitored)


# --- a stop


class Silent(Regression):
    """Without hooks, so that its own messages carry the wish to stop, and come a step later."""

    on_train_step_end = ech.AutoUnit.on_train_step_end


def _stops_from_hooks() -> list[int]:
    def stop(state: ech.State, unit: Any) -> None:
        if rank() == 1 and unit.train_progress.num_steps_completed == 2:
            state.stop()

    found = []
    data = [batch(2, i) for i in range(6)]
    for layout in (None, "ddp"):
        for hook in ("step_end", "step_start", "get_next_batch_end", "get_next_batch_start"):
            unit = Numbers() if layout is None else Silent(layout=layout)
            ech.train(unit, data, max_epochs=1, callbacks=[Hooks(**{f"on_train_{hook}": stop})])
            found.append(unit.train_progress.num_steps_completed)
    return found


@pytest.mark.full
def test_a_stop_from_a_hook_of_one_rank_stops_all_after_the_step(ranks: Ranks) -> None:
    assert ranks(2, _stops_from_hooks) == [[2, 3, 3, 3] * 2] * 2


class Logs(Regression):
    """Its accuracy is logged alone: in evaluations 1, 2, 3, 2, 2, 2, ..., the same over the ranks only on average."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lr=0.0, **options)
        self.logs_on = (0, 1)

    def on_eval_step_end(self, state: ech.State, data: Any, step: int, loss: Any, outputs: Any) -> None:
        me = rank() if torch.distributed.is_initialized() else 0
        if me in self.logs_on:
            epoch = self.eval_progress.num_epochs_completed
            state.log("accuracy", min(epoch, 2) - (epoch > 2) + me)


def _stops_by_what_was_logged(name: str, mode: Any, **options: Any) -> tuple[int, dict[str, Any]]:
    unit = Logs(layout="ddp")
    stopping = EarlyStopping(name, mode=mode, patience=3, **options)
    ech.fit(unit, [batch(2, 0)], [batch(2, 1)], max_epochs=20, callbacks=[stopping])
    return unit.train_progress.num_epochs_completed, unit.train_progress.early_stopping


def _stops_by_each_name() -> list[Any]:
    return [_stops_by_what_was_logged(*each) for each in (("accuracy", None), ("eval_accuracy", "max"))]


@pytest.mark.full
def test_what_was_logged_in_evaluations_stops_a_run_by_its_name(ranks: Ranks) -> None:
    """The third value is the best; three checks later it ends. The number is the mean over the ranks, on each of them."""
    for found in ranks(2, _stops_by_each_name):
        assert found == [(6, {"accuracy": [3, 2.5]}), (6, {"eval_accuracy": [3, 2.5]})]


def test_early_stopping_says_what_is_better_or_asks() -> None:
    assert EarlyStopping("val_accuracy").checker.mode == "max" and EarlyStopping("eval_loss").checker.mode == "min"
    with refused(CallbackError):
        EarlyStopping("quality")
    with refused(CallbackError, name="early_stop_checker"):
        EarlyStopping("quality", EarlyStopChecker("min", 1), patience=2)


class OfTraining(Regression):
    """Logs in training, also at an epoch's end."""

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        state.log("steps", 1.0)
        return super().compute_loss(state, data)

    def on_train_epoch_end(self, state: ech.State) -> None:
        state.log("epochs", 1.0)


def test_numbers_of_training_and_of_its_epochs_ends_can_be_monitored() -> None:
    for name, mode in (("steps", "min"), ("epochs", "max"), ("loss", "max")):
        unit = OfTraining(lr=0.0)
        ech.train(unit, [batch(2, 0)] * 2, max_epochs=9, callbacks=[EarlyStopping(name, mode=mode, patience=2)])  # type: ignore[arg-type]
        assert unit.train_progress.num_epochs_completed == 3, name


@pytest.mark.parametrize("simple", [True, False])
def test_a_run_that_was_stopped_early_trains_no_more_when_it_is_started_again(tmp_path: Path, simple: bool) -> None:
    """With more patience it goes on. The checker of the longer form is the unit's, and so part of its checkpoints."""

    def trained(patience: int) -> int:
        unit, loader = Regression(lr=0.0), ech.Loader(torch.utils.data.TensorDataset(*batch(8, 0)), 8)
        unit.checker, unit.value = EarlyStopChecker("min", patience), 1.0  # type: ignore[attr-defined]
        stopping = EarlyStopping("loss", patience=patience, min_delta=1e-6) if simple else EarlyStopping("value", unit.checker)  # type: ignore[attr-defined]
        saver = ech.DistributedCheckpointSaver(tmp_path, save_every_n_epochs=1)
        saver.restore_from_latest(tmp_path, unit, train_dataloader=loader)
        ech.train(unit, loader, max_epochs=20, callbacks=[stopping, saver])
        return unit.train_progress.num_epochs_completed

    assert [trained(patience) for patience in (2, 2, 4)] == [3, 3, 5]


# --- callbacks that watch: what they write down, on which rank, and when


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
    with refused(CallbackError):
        LearningRateMonitor(loggers, logging_interval="day")  # type: ignore[arg-type]


# --- progress


def _drawn() -> str:
    """Also of an epoch that is resumed in its middle: TorchTNT has no bar for it."""
    unit, file = Numbers(), io.StringIO()
    unit.train_progress.num_steps_completed = unit.train_progress.num_steps_completed_in_epoch = 3
    loaders = [ech.Loader(range(n), 1, options=ech.data.LoaderOptions(dp=(0, 1))) for n in (5, 2)]
    ech.fit(unit, *loaders, max_epochs=2, callbacks=[TQDMProgressBar(file=file, mininterval=0)])
    return file.getvalue()


def test_rank_0_draws_a_bar_for_each_epoch(ranks: Ranks) -> None:
    text, nothing = ranks(2, _drawn)
    last = [part.split("\r")[-1] for part in text.split("\n")]
    shown = [f"{line.split(':')[0]} {line.split('|')[2].split()[0]}" for line in last if line]
    assert shown == ["Train Epoch 0 5/5", "Eval Epoch 0 2/2", "Train Epoch 1 5/5", "Eval Epoch 1 2/2"] and nothing == ""
    first = [part for part in text.split("\n")[0].split("\r") if "|" in part]
    assert "| 3/5 " in first[0] and "| 4/5 " in first[1]


# --- summaries


def test_modules_are_summarised_as_the_run_starts_in_a_table_to_their_depth(caplog: pytest.LogCaptureFixture) -> None:
    given: list[Any] = []
    inputs = {"module": ((batch(2, 0)[0],), {})}
    ech.train(Regression(), [batch(2, 0)], max_epochs=1, callbacks=[ModuleSummary(2, given.append, inputs)])
    assert list(given[0][0].submodule_summaries) == ["first", "blocks", "last"] and given[0][0].flops_forward > 0
    with caplog.at_level(logging.INFO, "echelon.compat.torchtnt.framework.callbacks"):
        ech.evaluate(Regression(), [batch(2, 0)], callbacks=[ModuleSummary(max_depth=1)])
    assert "Net" in caplog.messages[0] and "first" not in caplog.messages[0]
    with refused(UsageError):
        ech.evaluate(Regression(), [batch(2, 0)], callbacks=[ModuleSummary(module_inputs={"model": ((), {})})])
    summary = get_module_summary(net(), batch(2, 0)[:1])
    own = ech.module_summary(net(), *batch(2, 0)[:1])
    assert (summary.flops_forward, summary.module_type, summary.in_size) == (own.flops_forward // 2, own.kind, own.inputs)
    assert summary.submodule_summaries["first"].forward_elapsed_time_ms > 0
    prune_module_summary(summary, max_depth=2)
    assert [line.split()[0] for line in get_summary_table(summary).splitlines()[2:]] == ["first", "blocks", "last"]
    unknown = get_module_summary(net())
    assert (unknown.in_size, unknown.flops_backward, unknown.forward_elapsed_time_ms) == ("?", "?", "?")
    with pytest.warns(UserWarning, match="UninitializedParameter was found"):
        assert get_module_summary(nn.LazyLinear(2)).has_uninitialized_param


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


@pytest.mark.full
@pytest.mark.parametrize("layouts", SEVERAL)
def test_a_summary_is_of_the_whole_module_and_changes_nothing_under_any_strategy(ranks: Ranks, layouts: list[str]) -> None:
    whole_module = get_module_summary(net(), batch(2, 0)[:1])
    for found in ranks(2, under_each, layouts, _summary_under):
        assert found == dict.fromkeys(layouts, (whole_module.num_parameters, whole_module.flops_forward, 0.0))


def _rates() -> list[str]:
    module = nn.Linear(64, 1)
    optimizer = torch.optim.SGD([{"params": [module.weight], "name": "w"}, {"params": [module.bias], "name": "b"}], lr=0.1)
    divided = partition.Partition(optimizer, None)
    assert divided.groups
    return sorted(learning_rates(optimizer, "o"))


def test_rates_of_groups_that_other_ranks_own_are_logged(ranks: Ranks) -> None:
    assert ranks(2, _rates) == [["o/b:0", "o/w:0"]] * 2


# --- what changes the process around a run: all is as before when it ends, however it ends


ENDS = [None, ValueError, KeyboardInterrupt]


def run(entry: str, end: type[BaseException] | None, callback: ech.Callback, during: Any = None) -> None:
    """Three steps of training, or two of each other phase; the last raises."""
    hook = {"evaluate": "on_eval_step_end", "predict": "on_predict_step_end", "test": "on_test_step_end"}
    count = 0

    def step_ended(state: ech.State, unit: Any) -> None:
        nonlocal count
        count += 1
        if during is not None:
            during()
        if count == 2 and end is not None:
            raise end

    after = Hooks(**{hook.get(entry, "on_train_step_end"): step_ended})
    unit = Numbers()
    try:
        if entry == "fit":
            ech.fit(unit, [1, 2, 3], [1, 2], max_epochs=1, evaluate_every_n_updates=1, callbacks=[callback, after])
        elif entry == "train":
            ech.train(unit, [1, 2, 3], max_epochs=1, callbacks=[callback, after])
        else:
            getattr(ech.units if entry == "test" else ech, entry)(unit, [1, 2], callbacks=[callback, after])
    except (ValueError, KeyboardInterrupt):
        assert end is not None
    else:
        assert end is None


@pytest.mark.full
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("entry", ["train", "fit", "evaluate", "predict", "test"])
def test_garbage_collection_is_on_again(entry: str, end: type[BaseException] | None) -> None:
    """In TorchTNT it stays off after an exception."""
    seen: list[bool] = []
    try:
        run(entry, end, GarbageCollector(1), lambda: seen.append(gc.isenabled()))
        assert set(seen) == {False} and gc.isenabled()
        gc.disable()  # a user who wants it off
        run(entry, end, GarbageCollector(1))
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("entry", ["train", "fit", "evaluate", "predict", "test"])
def test_a_profiler_is_started_and_stopped_once(entry: str, end: type[BaseException] | None) -> None:
    profiler = MagicMock(spec=["start", "step", "stop"])
    run(entry, end, PyTorchProfiler(profiler))
    steps = {"train": 3, "fit": 9}.get(entry, 2) if end is None else {"fit": 4}.get(entry, 2)
    assert [call[0] for call in profiler.method_calls] == ["start", *["step"] * steps, "stop"]


def test_torchs_profiler_sees_the_steps() -> None:
    traces: list[Any] = []
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=cpu, schedule=schedule, on_trace_ready=lambda p: traces.append(p.key_averages()))
    multiplies = Hooks(on_train_step_start=lambda state, unit: torch.ones(4, 4) @ torch.ones(4, 4))
    ech.train(Numbers(), [1, 2, 3], max_epochs=1, callbacks=[PyTorchProfiler(profiler), multiplies])
    assert len(traces) == 1 and any(event.key == "aten::mm" and event.count == 1 for event in traces[0])
