"""The loops: order of hooks, limits, stops, what ranks agree on, and the defects of TorchTNT that must not be here."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import echelon as ech
from echelon.common.errors import EchelonError, LauncherEnvironmentError, LoopError, RanksDisagreeError, UnitError
from echelon.compat.torchtnt.utils.timer import Timer
from echelon.loop.callbacks.early_stopping import EarlyStopping
from echelon.loop.unit import Stateful
from tests.conftest import Ranks
from tests.kit.models import batch, net
from tests.kit.refusals import refused
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks


class Plain(ech.TrainUnit[int], ech.EvalUnit[int], ech.PredictUnit[int], ech.units.TestUnit[int]):
    """Writes down what it was given."""

    def __init__(self, log: list[str] | None = None) -> None:
        super().__init__()
        self.log = [] if log is None else log
        self.seen: list[int] = []

    def train_step(self, state: ech.State, data: int) -> int:
        self.log.append("unit.train_step")
        self.seen.append(data)
        return data

    def eval_step(self, state: ech.State, data: int) -> None:
        self.log.append("unit.eval_step")
        assert not torch.is_grad_enabled()

    def predict_step(self, state: ech.State, data: int) -> int:
        assert torch.is_inference_mode_enabled()
        self.seen.append(data)
        return data

    def test_step(self, state: ech.State, data: int) -> None:
        self.seen.append(data)


def _recording(log: list[str], who: str, base: type) -> Any:
    """An object with every hook of `base` overridden by one that writes its name down."""
    hooks = {
        name: (lambda n: lambda self, *a: log.append(f"{who}.{n}"))(name)
        for name in dir(base)
        if name.startswith("on_") and name != "on_exception"
    }
    return type(f"Recording{base.__name__}", (base,), hooks)


def test_hooks_run_in_torchtnts_order() -> None:
    log: list[str] = []
    unit = _recording(log, "unit", Plain)(log)
    unit.__class__.on_train_step_end = Plain.on_train_step_end  # TorchTNT's TrainUnit has none
    ech.train(unit, [1, 2], max_epochs=1, callbacks=[_recording(log, "cb", ech.Callback)()])
    step = ["cb.get_next_batch_start", "cb.get_next_batch_end", "cb.step_start", "unit.train_step", "cb.step_end"]
    want = ["unit.start", "cb.start", "unit.epoch_start", "cb.epoch_start"]
    want += ["cb.dataloader_iter_creation_start", "cb.dataloader_iter_creation_end", *step, *step, "cb.get_next_batch_start"]
    want += ["unit.epoch_end", "cb.epoch_end", "unit.end", "cb.end"]
    assert [entry.replace("on_train_", "") for entry in log] == want


def test_fit_evaluates_inside_the_epoch_after_the_step() -> None:
    log: list[str] = []
    unit = Plain(log)
    ech.fit(unit, [1, 2, 3, 4], [1], max_epochs=1, evaluate_every_n_updates=2, evaluate_every_n_epochs=None)
    assert log == ["unit.train_step"] * 2 + ["unit.eval_step"] + ["unit.train_step"] * 2 + ["unit.eval_step"]


def _evaluated(length: int, **options: Any) -> list[int]:
    """After how many training steps evaluations came."""
    at = []

    class Note(ech.Callback):
        def on_eval_end(self, state: ech.State, unit: Any) -> None:
            at.append(unit.train_progress.num_steps_completed)

    ech.fit(Plain(), list(range(length)), [1], callbacks=[Note()], **options)
    return at


@pytest.mark.parametrize(
    ("length", "options", "at"),
    [
        (100, {"max_updates": 7}, [7]),  # within the first epoch
        (4, {"max_updates": 10}, [4, 8, 10]),
        (4, {"max_updates": 8}, [4, 8]),  # not twice
        (4, {"max_updates": 8, "evaluate_every_n_epochs": 3}, [8]),
        (100, {"max_updates": 7, "evaluate_every_n_updates": 3, "evaluate_every_n_epochs": None}, [3, 6, 7]),
        (100, {"max_updates": 6, "evaluate_every_n_updates": 3}, [3, 6]),
        (iter(range(100)), {"max_updates": 7}, [7]),  # a loader without a length
        (100, {"max_updates": 7, "evaluate_every_n_epochs": None}, []),  # nobody asked for any
        (4, {"max_epochs": 3, "evaluate_every_n_epochs": 2}, [8]),  # epochs: as the interval says
        (100, {"max_updates": 0}, []),
    ],
)
def test_fit_that_max_steps_ends_is_evaluated_at_its_end(length: Any, options: dict[str, Any], at: list[int]) -> None:
    if isinstance(length, int):
        assert _evaluated(length, **options) == at
    else:
        log: list[str] = []
        ech.fit(Plain(log), length, [1], **options)
        assert log == ["unit.train_step"] * 7 + ["unit.eval_step"]


def test_a_stop_of_the_scripts_own_is_not_evaluated() -> None:
    class Stops(ech.Callback):
        def on_train_step_end(self, state: ech.State, unit: Any) -> None:
            if unit.train_progress.num_steps_completed == 7:
                state.stop()

    log: list[str] = []
    ech.fit(Plain(log), [1] * 100, [1], max_updates=9, callbacks=[Stops()])
    assert log == ["unit.train_step"] * 7


def test_an_epochs_last_step_is_evaluated_once_though_both_intervals_end() -> None:
    log: list[str] = []
    ech.fit(Plain(log), [1, 2], [1], max_epochs=1, evaluate_every_n_updates=2, evaluate_every_n_epochs=1)
    assert log.count("unit.eval_step") == 1


@pytest.mark.parametrize("limit", [2, 3, 5])
def test_every_epoch_runs_as_many_steps_as_allowed(limit: int) -> None:
    """TorchTNT with prefetch runs every other epoch empty when the limit is the loader's length."""
    for unit in (Plain(), Regression(enable_prefetch=True)):
        data = [1, 2, 3] if isinstance(unit, Plain) else [batch(2, i) for i in range(3)]
        ech.train(unit, data, max_epochs=3, updates_per_epoch=limit)
        assert unit.train_progress.num_steps_completed == 3 * min(limit, 3)


def test_no_batch_of_one_epoch_leaks_into_the_next() -> None:
    unit = Plain()
    ech.train(unit, [0, 1, 2], max_epochs=3, updates_per_epoch=2)
    assert unit.seen == [0, 1, 0, 1, 0, 1]


def test_samplers_with_a_generator_give_what_a_for_loop_gives() -> None:
    """RandomSampler draws once more from its generator as an epoch ends, from which the next one's order follows."""

    def loader() -> DataLoader[int]:
        rows: Any = range(6)
        return DataLoader(rows, batch_size=None, sampler=RandomSampler(rows, generator=torch.Generator().manual_seed(0)))

    unit, plain, read = Plain(), loader(), Plain()
    ech.train(unit, loader(), max_epochs=3)
    assert unit.seen == [int(row) for _ in range(3) for row in plain]
    cut, plain = loader(), loader()
    ech.train(read, cut, max_epochs=2, updates_per_epoch=2)
    assert read.seen == [int(row) for _ in range(2) for row in itertools.islice(plain, 2)]

    class Stream:
        """Goes on where the epoch before ended."""

        def __init__(self) -> None:
            self.rows = itertools.count()

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[int]:
            return self.rows

    endless = Plain()
    ech.train(endless, Stream(), max_epochs=2)
    assert endless.seen == [0, 1, 2, 3], "and what goes on beyond its length loses nothing"


def test_max_steps_in_mid_epoch_does_not_count_the_epoch() -> None:
    log: list[str] = []
    unit = Plain()
    ech.train(unit, [0, 1, 2], max_updates=4, callbacks=[_recording(log, "cb", ech.Callback)()])
    assert unit.train_progress.num_epochs_completed == 1
    assert unit.train_progress.num_steps_completed_in_epoch == 1
    assert log.count("cb.on_train_epoch_end") == 1 and log[-1] == "cb.on_train_end"


def test_max_steps_at_the_end_of_an_epoch_counts_it() -> None:
    unit = Plain()
    ech.train(unit, [0, 1, 2], max_updates=6)
    assert unit.train_progress.num_epochs_completed == 2


class StopAfter(ech.Callback):
    def __init__(self, step: int, rank: int = 0) -> None:
        self.step, self.rank = step, rank

    def on_train_step_end(self, state: ech.State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == self.step and ech.launching.World.current().rank == self.rank:
            state.stop()


def test_a_stop_ends_after_the_step_and_runs_no_evaluation() -> None:
    log: list[str] = []
    unit = Plain(log)
    ech.fit(unit, [1, 2, 3, 4], [1], max_epochs=5, callbacks=[StopAfter(2)])
    assert log == ["unit.train_step"] * 2
    assert unit.train_progress.num_epochs_completed == 0


def _stop_on_one_rank(kind: str) -> tuple[int, int]:
    unit = Plain() if kind == "plain" else Regression(layout="ddp", accumulate=2)
    data = list(range(10)) if kind == "plain" else [batch(2, i) for i in range(10)]
    ech.train(unit, data, max_epochs=1, callbacks=[StopAfter(3, rank=1)])
    return unit.train_progress.num_steps_completed, torch.distributed.get_rank()


def test_a_stop_of_one_rank_stops_all_after_the_same_step(ranks: Ranks) -> None:
    assert ranks(2, _stop_on_one_rank, "plain") == [(3, 0), (3, 1)]


def test_a_stop_finishes_the_update_under_way(ranks: Ranks) -> None:
    assert ranks(2, _stop_on_one_rank, "auto") == [(4, 0), (4, 1)]


class StopsInEvaluation(ech.Callback):
    def on_eval_end(self, state: ech.State, unit: Any) -> None:
        if ech.launching.World.current().rank == 1:
            state.stop()


def _stop_in_evaluation() -> int:
    unit = Regression(layout="ddp")
    ech.fit(unit, [batch(2, 0)] * 4, [batch(2, 1)], max_epochs=3, evaluate_every_n_updates=2, callbacks=[StopsInEvaluation()])
    return unit.train_progress.num_steps_completed


def test_a_stop_from_an_evaluation_takes_no_further_step(ranks: Ranks) -> None:
    assert ranks(2, _stop_in_evaluation) == [2, 2]


class StopsOnRank1(ech.Callback):
    def on_eval_step_end(self, state: ech.State, unit: Any) -> None:
        if ech.launching.World.current().rank == 1:
            state.stop()


class Stopping(ech.EvalUnit[Any], ech.PredictUnit[Any]):
    steps = 0

    def eval_step(self, state: ech.State, data: Any) -> None:
        self.steps += 1
        state.stop()

    predict_step = eval_step


def _stop_outside_fit() -> tuple[Any, ...]:
    unit, auto = Stopping(), Regression(module=net(), layout="fsdp")
    ech.evaluate(unit, [1, 2, 3])
    ech.predict(unit, [1, 2, 3])
    ech.evaluate(auto, [batch(2, i) for i in range(4)], callbacks=[StopsOnRank1()])
    progress = unit.eval_progress, unit.predict_progress, auto.eval_progress
    return unit.steps, *(each.num_epochs_completed for each in progress)


def test_a_stop_outside_fit_leaves_an_evaluation_open_on_several_ranks(ranks: Ranks) -> None:
    assert ranks(2, _stop_outside_fit) == [(2, 0, 0, 0)] * 2


def _stop_with_own_step() -> int:
    class OwnStep(Regression):
        def train_step(self, state: ech.State, data: Any) -> Any:
            if self.train_progress.num_steps_completed == 1:
                state.stop()

    unit = OwnStep(layout="ddp")
    ech.train(unit, [batch(2, 0)] * 6, max_epochs=1)
    return unit.train_progress.num_steps_completed


def test_a_step_of_ones_own_can_stop_too(ranks: Ranks) -> None:
    assert ranks(2, _stop_with_own_step) == [2, 2]


def test_a_fetch_that_gives_up_ends_the_epoch_not_the_training() -> None:
    class TakesTwo(Plain):
        def get_next_train_batch(self, state: ech.State, data_iter: Iterator[int]) -> int:
            if self.train_progress.num_steps_completed_in_epoch == 2:
                raise StopIteration
            return next(data_iter)

    unit = TakesTwo()
    ech.train(unit, [1, 2, 3, 4], max_epochs=3)
    assert unit.seen == [1, 2] * 3 and unit.train_progress.num_epochs_completed == 3


def test_a_step_that_runs_out_of_something_else_says_where() -> None:
    class RunsOut(Plain):
        def train_step(self, state: ech.State, data: int) -> int:
            return next(iter([]))

    with refused(EchelonError) as caught:
        ech.train(RunsOut(), [1, 2], max_epochs=1)
    assert isinstance(caught.value.__cause__, StopIteration)


class StopsInLoss(Regression):
    def compute_loss(self, state: ech.State, data: Any) -> Any:
        if self.train_progress.num_steps_completed == 2 and ech.launching.World.current().rank == 1:
            state.stop()
        return super().compute_loss(state, data)


StopsInLoss.on_train_step_end = ech.AutoUnit.on_train_step_end  # type: ignore[method-assign]  # so that nothing can stop after the step


def _stop_in_loss() -> int:
    unit = StopsInLoss(layout="ddp")
    ech.train(unit, [batch(2, i) for i in range(10)], max_epochs=1)
    return unit.train_progress.num_steps_completed


def test_a_stop_inside_a_step_travels_with_the_windows_own_message(ranks: Ranks) -> None:
    assert ranks(2, _stop_in_loss) == [3, 3]


def _other_lengths(kind: str) -> str:
    rank = ech.launching.World.current().rank
    data: Any = [batch(2, i) for i in range(3 - rank)]
    if kind.startswith("unsized"):
        data = iter(data)
    accumulation = 3 if kind == "unsized, in a window" else 1  # its last batch ends a window on one rank, not on the other
    unit = Regression(layout="fsdp" if kind == "evaluate" else "ddp", accumulate=accumulation)
    with pytest.raises(RanksDisagreeError) as caught:
        if kind == "evaluate":
            ech.evaluate(unit, data)
        else:
            ech.train(unit, data, max_epochs=1)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["sized", "unsized", "unsized, in a window", "evaluate"])
def test_ranks_with_other_numbers_of_batches_are_named_not_hung(ranks: Ranks, kind: str) -> None:
    for text in ranks(2, _other_lengths, kind):
        assert "rank 0" in text and "rank 1" in text
        assert ("3" in text and "2" in text) or kind.startswith("unsized")


def _other_limits() -> str:
    with pytest.raises(RanksDisagreeError) as caught:
        ech.train(Regression(layout="ddp"), [batch(2, 0)] * 9, max_updates=3 + ech.launching.World.current().rank)
    return str(caught.value)


def test_ranks_with_other_limits_are_named_not_hung(ranks: Ranks) -> None:
    for text in ranks(2, _other_limits):
        assert "'max_updates': 3" in text and "'max_updates': 4" in text


def _launched_but_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)


def test_launched_ranks_that_have_not_joined_are_not_taken_for_a_world_of_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _launched_but_not_joined(monkeypatch)
    with refused(LauncherEnvironmentError):
        Regression(layout="ddp")
    ech.train(Plain(), [1], max_epochs=1)
    assert "2 ranks were launched" in caplog.text


def _uneven_prediction() -> int:
    unit = Plain()
    ech.predict(unit, list(range(3 - ech.launching.World.current().rank)))
    return len(unit.seen)


def test_predictions_without_collectives_may_differ_in_number(ranks: Ranks) -> None:
    assert ranks(2, _uneven_prediction) == [3, 2]


def test_predict_runs_as_often_as_it_is_called() -> None:
    unit = Plain()
    for _ in range(2):
        ech.predict(unit, [1, 2])
    assert unit.seen == [1, 2, 1, 2]


def test_test_is_a_phase_of_its_own() -> None:
    unit = Plain()
    ech.units.test(unit, [1, 2])
    assert unit.seen == [1, 2] and unit.test_progress.num_epochs_completed == 1


class FetchesItself(ech.TrainUnit[Iterator[int]]):
    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[int, int]] = []

    def train_step(self, state: ech.State, data: Iterator[int]) -> None:
        self.pairs.append((next(data), next(data)))


def test_a_step_that_takes_the_iterator_fetches_its_own_batches() -> None:
    unit = FetchesItself()
    ech.train(unit, [1, 2, 3, 4], max_epochs=1)
    assert unit.pairs == [(1, 2), (3, 4)] and unit.train_progress.num_steps_completed == 2


class Pairs(Plain):
    def get_next_train_batch(self, state: ech.State, data_iter: Iterator[int]) -> int:
        return next(data_iter) + 10 * next(data_iter)


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize(
    ("limits", "epochs", "steps"),
    [
        ({"max_updates": 2}, 0, 2),
        ({"max_updates": 1}, 0, 1),
        ({"max_epochs": 2, "updates_per_epoch": 2}, 2, 4),
        ({"max_updates": 4}, 1, 4),
    ],
)
def test_limits_count_steps_however_many_batches_each_fetches(limits: Any, epochs: int, steps: int, sized: bool) -> None:
    class Unsized:
        def __iter__(self) -> Iterator[int]:
            return iter(range(6))

    fetches, pairs = FetchesItself(), Pairs()
    for unit in (fetches, pairs):
        ech.train(unit, range(6) if sized else Unsized(), **limits)
        done = unit.train_progress
        assert (done.num_steps_completed, done.num_epochs_completed) == (steps, epochs)
    assert len(fetches.pairs) == len(pairs.seen) == steps


def test_a_step_that_fetches_nothing_still_counts() -> None:
    class Idle(FetchesItself):
        def train_step(self, state: ech.State, data: Iterator[int]) -> None:
            assert self.train_progress.num_steps_completed < 5

    unit = Idle()
    ech.train(unit, [1, 2], max_updates=5)
    assert unit.train_progress.num_steps_completed == 5


def test_a_unit_can_fetch_its_batches_otherwise() -> None:
    class Doubles(Plain):
        def get_next_train_batch(self, state: ech.State, data_iter: Iterator[int]) -> int:
            return 2 * next(data_iter)

    unit = Doubles()
    ech.train(unit, [1, 2], max_epochs=1)
    assert unit.seen == [2, 4]


class Breaks(Plain):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.module, self.error, self.told = nn.Dropout(), error, None

    def train_step(self, state: ech.State, data: int) -> int:
        raise self.error

    def on_exception(self, state: ech.State, exc: BaseException) -> None:
        self.told = exc


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_whatever_ends_a_run_is_told_and_leaves_modules_in_their_mode(error: BaseException) -> None:
    unit = Breaks(error)
    unit.module.eval()
    told = []
    callback = ech.Callback()
    callback.on_exception = lambda state, u, exc: told.append(exc)  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        ech.train(unit, [1], max_epochs=1, callbacks=[callback])
    assert unit.told is error and told == [error]
    assert not unit.module.training


def test_modes_are_restored_module_by_module() -> None:
    unit = Regression()
    unit.module.train()
    unit.module.first.eval()
    ech.evaluate(unit, [batch(2, 0)])
    assert unit.module.training and not unit.module.first.training


def test_a_used_up_iterator_is_an_error_not_an_endless_loop(caplog: pytest.LogCaptureFixture) -> None:
    with refused(LoopError):
        ech.train(Plain(), iter([1, 2]), max_updates=5)
    ech.train(Plain(), iter([1, 2]), max_epochs=2)
    assert "gave no batch" in caplog.text


def test_going_on_in_mid_epoch_with_a_loader_without_state_warns(caplog: pytest.LogCaptureFixture) -> None:
    unit = Plain()
    ech.train(unit, [1, 2, 3], max_updates=2)
    assert not caplog.text
    ech.train(unit, [1, 2, 3], max_updates=4)
    assert "has no state" in caplog.text


def test_an_error_while_reporting_an_error_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fails(*args: Any) -> None:
        raise OSError("disk full")

    first, second, told = ech.Callback(), ech.Callback(), []
    first.on_exception = fails  # type: ignore[method-assign]
    second.on_exception = lambda *args: told.append(1)  # type: ignore[method-assign]
    with pytest.raises(ValueError):
        ech.train(Breaks(ValueError()), [1], max_epochs=1, callbacks=[first, second])
    assert told == [1] and "disk full" in caplog.text


def test_sampler_epochs_are_set() -> None:
    class Sampled(list[int]):
        def __init__(self) -> None:
            super().__init__([1, 2])
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    data = Sampled()
    ech.train(Plain(), data, max_epochs=3)
    assert data.epochs == [0, 1, 2]


@pytest.mark.parametrize(
    "value", [-1, 1.5, True, "10", math.nan, np.float64(2.5), np.bool_(True), torch.tensor(True), torch.ones(2), [1]]
)
@pytest.mark.parametrize("name", ["max_epochs", "max_updates", "updates_per_epoch"])
def test_limits_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    limits = {"max_epochs": 1} | {name: value}
    with refused(LoopError, name=name, got=repr(value)):
        ech.train(Plain(), [1], **limits)


@pytest.mark.parametrize("value", [0, 0.5, False])
def test_an_evaluation_after_every_zeroth_step_is_refused(value: Any) -> None:
    with refused(LoopError):
        ech.fit(Plain(), [1], [1], max_epochs=1, evaluate_every_n_updates=value)


@pytest.mark.parametrize("value", [2, 2.0, 6 / 3, np.int64(2), np.float32(2), np.array(2), torch.tensor(2), torch.tensor(2.0)])
def test_whole_numbers_are_limits_however_they_are_written(value: Any) -> None:
    for limits, steps in (
        ({"max_updates": value}, 2),
        ({"max_epochs": value}, 6),
        ({"max_epochs": 1, "updates_per_epoch": value}, 2),
    ):
        unit = Plain()
        ech.train(unit, [1, 2, 3], **limits)
        assert unit.train_progress.num_steps_completed == steps
    assert _evaluated(6, max_epochs=1, evaluate_every_n_updates=value) == [2, 4, 6]


@pytest.mark.parametrize("limits", [{"max_epochs": 0}, {"max_updates": 0}, {"max_updates": 0.0, "max_epochs": math.inf}])
def test_nothing_to_do_is_done_without_a_step(limits: Any) -> None:
    unit = Plain()
    ech.train(unit, [1, 2], **limits)
    assert unit.seen == [] and unit.train_progress.num_epochs_completed == 0


def test_training_without_an_end_must_be_asked_for() -> None:
    class Stops(ech.Callback):
        def on_train_step_end(self, state: ech.State, unit: Any) -> None:
            if unit.train_progress.num_steps_completed == 5:
                state.stop()

    for call in (ech.train, lambda unit, loader, **more: ech.fit(unit, loader, [1], **more)):
        with refused(LoopError):
            call(Plain(), [1, 2])
        unit = Plain()
        call(unit, [1, 2], max_epochs=math.inf, callbacks=[Stops()])
        assert unit.train_progress.num_steps_completed == 5


def test_arguments_in_anothers_place_are_named() -> None:
    loader = [1, 2]
    with refused(UnitError):
        ech.train(loader, Plain(), max_epochs=1)  # type: ignore[arg-type, type-var]
    with refused(UnitError):
        ech.fit(loader, Plain(), loader, max_epochs=1)
    with refused(UnitError):
        ech.evaluate(loader, Plain())  # type: ignore[arg-type, type-var]
    with refused(UnitError):
        ech.train(Plain, loader, max_epochs=1)  # type: ignore[arg-type]
    with refused(LoopError):
        ech.train(Plain(), 3, max_epochs=1)  # type: ignore[arg-type]
    with refused(LoopError):
        ech.train(Plain(), {"a": loader, "b": loader}, max_epochs=1)  # trained on the names


@pytest.mark.parametrize(
    "given",
    [
        [ech.Callback],
        ech.Callback(),
        ech.Callback,
        [ech.Callback(), None],
        [print],
    ],
)
def test_what_is_no_callback_is_refused_before_a_step(given: Any) -> None:
    unit = Plain()
    with refused(LoopError):
        ech.train(unit, [1], max_epochs=1, callbacks=given)
    assert unit.seen == []


def test_mocks_and_whatever_has_a_hook_are_callbacks() -> None:
    with_spec, without, of_subclass = MagicMock(spec=ech.Callback), MagicMock(), MagicMock(spec=EarlyStopping)

    class Duck:
        steps = 0

        def on_train_step_end(self, state: ech.State, unit: Any) -> None:
            self.steps += 1

    class Fails(Exception): ...

    duck, own, seen = Duck(), ech.Callback(), []
    own.on_train_end = lambda state, unit: seen.append(unit)  # type: ignore[method-assign]
    unit = Plain()
    ech.fit(unit, [1, 2], [1], max_epochs=1, callbacks=[with_spec, without, of_subclass, duck, own])
    for mock in (with_spec, without, of_subclass):
        assert mock.on_train_step_end.call_count == 2 and mock.on_eval_end.call_count == 1 and not mock.on_exception.called
    assert duck.steps == 2 and seen == [unit]
    without.on_train_start.side_effect = Fails()
    with pytest.raises(Fails):
        ech.train(unit, [1], max_epochs=2, callbacks=[without, with_spec, duck, own])
    assert with_spec.on_exception.call_count == 1


def _with_mocks() -> tuple[int, int, list[str]]:
    callback, log = MagicMock(spec=ech.Callback), []
    unit = Plain(log)
    ech.fit(unit, [1, 2], [1, 2], max_epochs=2, callbacks=[callback])
    return callback.on_train_step_end.call_count, callback.on_eval_step_end.call_count, log


def test_mocks_are_callbacks_on_several_ranks(ranks: Ranks) -> None:
    want = (["unit.train_step"] * 2 + ["unit.eval_step"] * 2) * 2
    assert ranks(2, _with_mocks) == [(4, 4, want)] * 2


def test_a_unit_that_lacks_what_it_must_define_is_told_what() -> None:
    class NoLoss(ech.AutoUnit[Any]):
        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any: ...

    class NoStep(ech.TrainUnit[Any]): ...

    with refused(UnitError):
        NoLoss(module=net())  # type: ignore[abstract]
    with refused(UnitError):
        NoStep()  # type: ignore[abstract]


def test_a_timer_has_waits_hooks_and_evaluations_in_its_table() -> None:
    class Named(ech.Callback):
        name = "mine"

        def on_train_step_end(self, state: ech.State, unit: Any) -> None: ...

        def on_eval_end(self, state: ech.State, unit: Any) -> None: ...

    class Hooked(Plain):
        def on_train_epoch_end(self, state: ech.State) -> None: ...

    timer = Timer()
    ech.fit(Hooked(), [1, 2, 3], [1, 2], max_epochs=2, timer=timer, callbacks=[Named()])
    counts = {name: len(each) for name, each in timer.recorded_durations.items()}
    assert counts == {
        "train.iter(dataloader)": 2,
        "train.next(data_iter)": 6,
        "Hooked.train_step": 6,
        "callback.mine.on_train_step_end": 6,
        "Hooked.on_train_epoch_end": 2,
        "evaluate.iter(dataloader)": 2,
        "evaluate.next(data_iter)": 4,
        "Hooked.eval_step": 4,
        "callback.mine.on_eval_end": 2,
    }


def test_a_unit_without_the_step_of_its_entry_point_is_named() -> None:
    class OnlyTrains(ech.TrainUnit[int]):
        def train_step(self, state: ech.State, data: int) -> None: ...

    with refused(UnitError):
        ech.evaluate(OnlyTrains(), [1])  # type: ignore[arg-type]
    with refused(UnitError):
        ech.fit(OnlyTrains(), [1], [1], max_epochs=1)
    with refused(UnitError):
        type("Nothing", (ech.TrainUnit,), {})()


def test_a_unit_that_forgets_super_init_is_told_so() -> None:
    class Forgets(ech.TrainUnit[int]):
        def __init__(self) -> None:
            pass

        def train_step(self, state: ech.State, data: int) -> None: ...

    with refused(UnitError):
        ech.train(Forgets(), [1], max_epochs=1)


def test_what_a_unit_holds_is_its_state_sorted_by_kind() -> None:
    class Counter:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    unit = Plain()
    unit.net = net()
    unit.opt = torch.optim.SGD(unit.net.parameters(), lr=0.1)
    unit.sched = torch.optim.lr_scheduler.StepLR(unit.opt, 1)
    unit.counter, unit.mean, unit.kind = Counter(), ech.Mean(), Counter
    assert set(unit.tracked_modules()) == {"net"} and set(unit.tracked_optimizers()) == {"opt"}
    assert set(unit.tracked_lr_schedulers()) == {"sched"} and set(unit.tracked_metrics()) == {"mean"}
    assert set(unit.tracked_misc_statefuls()) == {"counter"}  # not the class
    assert isinstance(unit.counter, Stateful)
    unit.net = None  # type: ignore[assignment]
    assert "net" not in unit.app_state()


def test_iteration_times_are_kept_and_bounded() -> None:
    class Looks(ech.Callback):
        def on_train_end(self, state: ech.State, unit: Any) -> None:
            assert state.train_state is not None
            self.durations = state.train_state.iteration_timer.recorded_durations

    looks = Looks()
    ech.train(Plain(), [1, 2, 3], max_epochs=1, callbacks=[looks])
    assert len(looks.durations["train_iteration_time"]) == 3 == len(looks.durations["data_wait_time"])


def test_a_run_leaves_no_reference_cycle_with_the_model() -> None:
    gc.collect()
    gc.disable()
    try:
        import weakref

        unit = Regression()
        module = weakref.ref(unit.module)
        ech.train(unit, [batch(2, 0)], max_epochs=1)
        del unit
        gc.collect()
        assert module() is None
    finally:
        gc.enable()


def test_a_hook_that_takes_something_else_is_refused_as_its_class_is_made() -> None:
    with refused(UnitError):

        class Logs(ech.AutoUnit[Any]):
            def on_train_step_end(self, state: Any, data: Any, step: int, loss: Any, outputs: Any) -> None:  # type: ignore[override]
                pass

    with refused(UnitError):
        type("Watches", (ech.Callback,), {"on_train_epoch_end": lambda self, state: None})

    class Takes(ech.AutoUnit[Any]):
        def on_train_step_end(self, *given: Any) -> None:
            pass

        def on_eval_step_end(self, state: Any, data: Any, step: int, loss: Any, outputs: Any, more: int = 0) -> None:
            pass

    type("Own", (Takes, ech.Callback), {"on_a_thing_of_its_own": lambda self: None})
