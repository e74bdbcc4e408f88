"""The loops: order of hooks, limits, stops, what ranks agree on, and the defects of TorchTNT that must not be here."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import echelon as ech
from echelon.common.errors import EchelonError, LoopError, RanksDisagreeError, UnitError
from echelon.compat.torchtnt.utils.timer import Timer
from echelon.loop.callbacks.early_stopping import EarlyStopping
from echelon.loop.unit import Stateful
from tests.conftest import Ranks
from tests.kit.models import batch, net
from tests.kit.refusals import refused
from tests.kit.units import Hooks, Regression

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


def _evaluated(length: Any, **options: Any) -> list[int]:
    """After how many training steps evaluations came."""
    at = list[int]()
    note = Hooks(on_eval_end=lambda state, unit: at.append(unit.train_progress.num_steps_completed))
    ech.fit(Plain(), length if isinstance(length, Iterator) else list(range(length)), [1], callbacks=[note], **options)
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
        (4, {"max_epochs": 1, "evaluate_every_n_updates": 2, "evaluate_every_n_epochs": None}, [2, 4]),
        (2, {"max_epochs": 1, "evaluate_every_n_updates": 2, "evaluate_every_n_epochs": 1}, [2]),  # once, though both end
    ],
)
def test_fit_that_max_steps_ends_is_evaluated_at_its_end(length: Any, options: dict[str, Any], at: list[int]) -> None:
    assert _evaluated(length, **options) == at


@pytest.mark.parametrize("limit", [2, 3, 5])
def test_every_epoch_runs_as_many_steps_as_allowed(limit: int) -> None:
    """TorchTNT with prefetch runs every other epoch empty when the limit is the loader's length."""
    plain, auto = Plain(), Regression(enable_prefetch=True)
    ech.train(plain, [1, 2, 3], max_epochs=3, updates_per_epoch=limit)
    ech.train(auto, [batch(2, i) for i in range(3)], max_epochs=3, updates_per_epoch=limit)
    assert plain.seen == [1, 2, 3][:limit] * 3 and auto.train_progress.num_steps_completed == 3 * min(limit, 3)


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


@pytest.mark.parametrize(("updates", "epochs", "rest"), [(4, 1, 1), (6, 2, 0)])
def test_max_steps_counts_the_epochs_that_are_whole(updates: int, epochs: int, rest: int) -> None:
    log: list[str] = []
    unit = Plain()
    ech.train(unit, [0, 1, 2], max_updates=updates, callbacks=[_recording(log, "cb", ech.Callback)()])
    assert unit.train_progress.num_epochs_completed == epochs == log.count("cb.on_train_epoch_end")
    assert unit.train_progress.num_steps_completed_in_epoch == rest and log[-1] == "cb.on_train_end"


def _stops_at(step: int, rank: int = 0) -> ech.Callback:
    def step_ended(state: ech.State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == step and ech.launching.World.current().rank == rank:
            state.stop()

    return Hooks(on_train_step_end=step_ended)


def _stops_on_rank_1(state: ech.State, unit: Any) -> None:
    if ech.launching.World.current().rank == 1:
        state.stop()


def test_a_stop_ends_after_the_step_and_runs_no_evaluation() -> None:
    log: list[str] = []
    unit = Plain(log)
    ech.fit(unit, [1, 2, 3, 4], [1], max_epochs=5, callbacks=[_stops_at(2)])
    assert log == ["unit.train_step"] * 2
    assert unit.train_progress.num_epochs_completed == 0


class Stopping(ech.EvalUnit[Any], ech.PredictUnit[Any]):
    steps = 0

    def eval_step(self, state: ech.State, data: Any) -> None:
        self.steps += 1
        state.stop()

    predict_step = eval_step


class OwnStep(Regression):
    def train_step(self, state: ech.State, data: Any) -> Any:
        if self.train_progress.num_steps_completed == 1:
            state.stop()


class StopsInLoss(Regression):
    def compute_loss(self, state: ech.State, data: Any) -> Any:
        if self.train_progress.num_steps_completed == 2:
            _stops_on_rank_1(state, self)
        return super().compute_loss(state, data)


StopsInLoss.on_train_step_end = ech.AutoUnit.on_train_step_end  # type: ignore[method-assign]  # so that nothing can stop after the step


def _stops() -> dict[str, Any]:
    """After how many steps each run ends."""
    data = [batch(2, i) for i in range(10)]
    units: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "of one rank": (Plain(), range(10), {"callbacks": [_stops_at(3, rank=1)]}),
        "within an update": (Regression(layout="ddp", accumulate=2), data, {"callbacks": [_stops_at(3, rank=1)]}),
        "in an evaluation": (
            Regression(layout="ddp"),
            data,
            {"eval": data[:1], "eval_every": 2, "callbacks": [Hooks(on_eval_end=_stops_on_rank_1)]},
        ),
        "in a step of its own": (OwnStep(layout="ddp"), data, {}),
        "in the loss": (StopsInLoss(layout="ddp"), data, {}),
        "before a step": (
            Regression(layout="ddp"),
            data,
            {"callbacks": [Hooks(on_train_epoch_start=_stops_on_rank_1)]},
        ),
    }
    for unit, loader, options in units.values():
        ech.train(unit, loader, max_epochs=1, **options)
    return {name: unit.train_progress.num_steps_completed for name, (unit, _, _) in units.items()}


def test_a_stop_of_one_rank_stops_all_after_the_same_step_and_the_update_under_way(ranks: Ranks) -> None:
    want = {"of one rank": 3, "within an update": 4, "in an evaluation": 2, "in a step of its own": 2, "in the loss": 3}
    want["before a step"] = 0
    assert ranks(2, _stops) == [want] * 2


def _stop_outside_fit() -> tuple[Any, ...]:
    unit, auto = Stopping(), Regression(module=net(), layout="fsdp")
    ech.evaluate(unit, [1, 2, 3])
    ech.predict(unit, [1, 2, 3])
    ech.evaluate(auto, [batch(2, i) for i in range(4)], callbacks=[Hooks(on_eval_step_end=_stops_on_rank_1)])
    progress = unit.eval_progress, unit.predict_progress, auto.eval_progress
    return unit.steps, *(each.num_epochs_completed for each in progress)


def test_a_stop_outside_fit_leaves_an_evaluation_open_on_several_ranks(ranks: Ranks) -> None:
    assert ranks(2, _stop_outside_fit) == [(2, 0, 0, 0)] * 2


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


def _other_lengths(kind: str) -> str:
    rank = ech.launching.World.current().rank
    data: Any = [batch(2, i) for i in range(3 - (rank if kind != "limits" else 0))]
    if kind.startswith("unsized"):
        data = iter(data)
    accumulation = 3 if kind == "unsized, in a window" else 1  # its last batch ends a window on one rank, not on the other
    unit = Regression(layout="fsdp" if kind == "evaluate" else "ddp", accumulate=accumulation)
    with pytest.raises(RanksDisagreeError) as caught:
        if kind == "evaluate":
            ech.evaluate(unit, data)
        else:
            ech.train(unit, data, **({"max_updates": 3 - rank} if kind == "limits" else {"max_epochs": 1}))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["sized", "unsized", "unsized, in a window", "evaluate", "limits"])
def test_ranks_with_other_numbers_of_batches_or_limits_are_named_not_hung(ranks: Ranks, kind: str) -> None:
    for text in ranks(2, _other_lengths, kind):
        assert "rank 0" in text and "rank 1" in text
        assert ("3" in text and "2" in text) or kind.startswith("unsized")


def _uneven_prediction() -> int:
    unit = Plain()
    ech.predict(unit, list(range(3 - ech.launching.World.current().rank)))
    return len(unit.seen)


def test_predictions_without_collectives_may_differ_in_number(ranks: Ranks) -> None:
    assert ranks(2, _uneven_prediction) == [3, 2]


def test_predict_runs_as_often_as_it_is_called_and_test_is_a_phase_of_its_own() -> None:
    unit = Plain()
    for _ in range(2):
        ech.predict(unit, [1, 2])
    ech.units.test(unit, [3])
    assert unit.seen == [1, 2, 1, 2, 3] and unit.test_progress.num_epochs_completed == 1


class FetchesItself(ech.TrainUnit[Iterator[int]]):
    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[int, int]] = []

    def train_step(self, state: ech.State, data: Iterator[int]) -> None:
        self.pairs.append((next(data), next(data)))


def test_a_step_that_takes_the_iterator_fetches_its_own_batches_if_any() -> None:
    class Idle(FetchesItself):
        def train_step(self, state: ech.State, data: Iterator[int]) -> None:
            assert self.train_progress.num_steps_completed < 5

    unit, idle = FetchesItself(), Idle()
    ech.train(unit, [1, 2, 3, 4], max_epochs=1)
    assert unit.pairs == [(1, 2), (3, 4)] and unit.train_progress.num_steps_completed == 2
    ech.train(idle, [1, 2], max_updates=5)
    assert idle.train_progress.num_steps_completed == 5


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


class Breaks(Plain):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.module, self.error, self.told = nn.Dropout(), error, None

    def train_step(self, state: ech.State, data: int) -> int:
        raise self.error

    def on_exception(self, state: ech.State, exc: BaseException) -> None:
        self.told = exc


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_whatever_ends_a_run_is_told_and_leaves_modules_in_their_mode(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a callback fails as it is told."""

    def fails(*args: Any) -> None:
        raise OSError("disk full")

    unit, told = Breaks(error), []
    unit.module.eval()
    callbacks = [Hooks(on_exception=fails), Hooks(on_exception=lambda state, u, exc: told.append(exc))]
    with pytest.raises(type(error)):
        ech.train(unit, [1], max_epochs=1, callbacks=callbacks)
    assert unit.told is error and told == [error] and "disk full" in caplog.text
    assert not unit.module.training


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
    assert "starts over" in caplog.text


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
@pytest.mark.parametrize("name", ["max_epochs", "max_updates", "updates_per_epoch", "evaluate_every_n_updates"])
def test_limits_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    limits = {"max_epochs": 1} | {name: value}
    with refused(LoopError, name=name, got=repr(value)):
        ech.fit(Plain(), [1], [1], **limits)


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
    for call in (ech.train, lambda unit, loader, **more: ech.fit(unit, loader, [1], **more)):
        with refused(LoopError):
            call(Plain(), [1, 2])
        unit = Plain()
        call(unit, [1, 2], max_epochs=math.inf, callbacks=[_stops_at(5)])
        assert unit.train_progress.num_steps_completed == 5


class OnlyTrains(ech.TrainUnit[int]):
    def train_step(self, state: ech.State, data: int) -> None: ...


class Forgets(OnlyTrains):
    def __init__(self) -> None:
        pass


LOADER = [1, 2]
WRONG: dict[str, tuple[type[EchelonError], Any]] = {
    "loader and unit": (UnitError, lambda: ech.train(LOADER, Plain(), max_epochs=1)),  # type: ignore[arg-type, type-var]
    "loader and unit of fit": (UnitError, lambda: ech.fit(LOADER, Plain(), LOADER, max_epochs=1)),
    "loader and unit of evaluate": (UnitError, lambda: ech.evaluate(LOADER, Plain())),  # type: ignore[arg-type, type-var]
    "a class": (UnitError, lambda: ech.train(Plain, LOADER, max_epochs=1)),  # type: ignore[arg-type]
    "a number": (LoopError, lambda: ech.train(Plain(), 3, max_epochs=1)),  # type: ignore[arg-type]
    "a dict": (LoopError, lambda: ech.train(Plain(), {"a": LOADER, "b": LOADER}, max_epochs=1)),  # trained on the names
    "every zeroth step": (LoopError, lambda: ech.fit(Plain(), [1], [1], max_epochs=1, evaluate_every_n_updates=0)),
    "no step of evaluate": (UnitError, lambda: ech.evaluate(OnlyTrains(), [1])),  # type: ignore[arg-type]
    "no step of fit": (UnitError, lambda: ech.fit(OnlyTrains(), [1], [1], max_epochs=1)),
    "no super().__init__()": (UnitError, lambda: ech.train(Forgets(), [1], max_epochs=1)),
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_in_anothers_place_are_named(what: str) -> None:
    kind, call = WRONG[what]
    with refused(kind):
        call()


@pytest.mark.parametrize("given", [[ech.Callback], ech.Callback(), ech.Callback, [ech.Callback(), None], [print]])
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


def test_what_a_unit_holds_is_its_state_sorted_by_kind() -> None:
    class Counter:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    class Configured(nn.Module):
        """As a model of diffusers: it answers for the methods of its config, with a KeyError."""

        def __getattr__(self, name: str) -> Any:
            return {}[name] if name in ("update", "compute") else super().__getattr__(name)

    unit = Plain()
    unit.net, unit.configured = net(), Configured()
    unit.opt = torch.optim.SGD(unit.net.parameters(), lr=0.1)
    unit.sched = torch.optim.lr_scheduler.StepLR(unit.opt, 1)
    unit.counter, unit.mean, unit.kind = Counter(), ech.Mean(), Counter
    assert set(unit.tracked_modules()) == {"net", "configured"} and set(unit.tracked_optimizers()) == {"opt"}
    assert set(unit.tracked_lr_schedulers()) == {"sched"} and set(unit.tracked_metrics()) == {"mean"}
    assert set(unit.tracked_misc_statefuls()) == {"counter"}  # not the class
    assert isinstance(unit.counter, Stateful)
    unit.net = None  # type: ignore[assignment]
    assert "net" not in unit.app_state()


def test_a_run_leaves_no_reference_cycle_with_the_model() -> None:
    gc.collect()
    gc.disable()
    try:
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
