"""`Checkpoints`: one value for restoring, saving when it is due, and keeping the newest and the best."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import echelon as ech
from echelon.checkpoint import manifest
from echelon.common.errors import CheckpointError, CheckpointOptionError, LoopError, RanksDisagreeError, UsageError
from echelon.loop.checkpointing.saver import Timetable
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.own_loops import step, told
from tests.kit.refusals import refused
from tests.kit.saving import steps_in
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

DATA = TensorDataset(*batch(24, 0))


def _numbers(folder: Path) -> dict[int, dict[str, Any]]:
    return {step: manifest.read(folder / manifest.named(step)).get("metrics", {}) for step in steps_in(folder)}


# --- the value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("every", value) for value in ("soon", 0)),
        *(("best", value) for value in ("quality", ("quality", "most"), 3)),
        *(("keep", 0), ("save_options", {}), ("restore_options", {})),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_written(name: str, value: Any) -> None:
    with refused(CheckpointOptionError):
        ech.Checkpoints("a", **{name: value})


# --- when the clock says so


def _saves(every_s: float, seconds: float, updates: int, share: float | None = None, cost: float = 0.0) -> tuple[list[int], int]:
    """The updates after which a run saves whose updates take so long, and how often ranks spoke about it."""
    clock, looks = [0.0], 0

    def now() -> float:
        nonlocal looks
        looks += 1
        return clock[0]

    table, saved = Timetable(every_s, share, now), []
    for update in range(1, updates + 1):
        clock[0] += seconds
        if table.is_due():
            saved.append(update)
            clock[0] += cost
            table.saved(cost)
    return saved, looks


def test_the_clock_is_looked_at_seldom_and_the_saves_come_in_time() -> None:
    saved, looks = _saves(600, 0.5, 10_000)
    assert len(saved) == 8 and all(abs((b - a) * 0.5 - 600) < 6 for a, b in zip([0, *saved], saved, strict=False))
    assert looks < 200
    assert _saves(600, 1000, 4)[0] == [1, 2, 3, 4]  # updates that take longer than that


def test_by_default_saving_takes_a_small_share_of_the_time() -> None:
    saved, _ = _saves(600, 1, 20_000, share=0.05, cost=300)
    assert saved[0] <= 606 and all(5700 <= b - a <= 6060 for a, b in itertools.pairwise(saved))


def test_a_dear_save_at_an_epochs_end_waits_until_it_is_worth_its_time() -> None:
    clock = [0.0]
    table = Timetable(600, 0.05, lambda: clock[0])
    found = []
    for cost, seconds in ((0.5, 1), (30, 1), (30, 500), (30, 700)):
        table.saved(cost)
        clock[0] += seconds
        found.append(table.affords_one())
    assert found == [True, False, False, True]


def _with_clocks_of_their_own() -> list[int]:
    """Rank 1's would be due at once, and rank 0's at each other update."""
    times = iter(range(0, 1000, 5)) if dist.get_rank() == 0 else iter(range(0, 10**6, 1000))
    table, found = Timetable(10.0, None, lambda: float(next(times))), []
    for update in range(8):
        if table.is_due():
            found.append(update)
            table.saved(0.0)
    return found


def test_ranks_agree_on_a_clock(ranks: Ranks) -> None:
    first, second = ranks(2, _with_clocks_of_their_own)
    assert first == second != []


# --- in a loop of one's own


def _loop(
    checkpoints: Any,
    epochs: int,
    *,
    kill_at: int | None = None,
    logs: Any = None,
    layout: str = "none",
    counts: bool = False,
    where: str = "",
    accumulate: int | None = None,
) -> Any:
    """Logs numbers in evaluations: those of `logs` in their order, rank r's by r greater; after each epoch, or in each batch
    before its window or after it. A list of logs is by epoch, since a resumed run begins in its middle."""
    model = net(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    held_out = torch.utils.data.DataLoader(TensorDataset(*batch(4, 1)), 2)
    loader = ech.Loader(DATA, 8, seed=1)
    given: Any = model, optimizer, loader, held_out
    model, optimizer, loader, held_out = ech.prepare(*given, layout=layout, checkpoints=checkpoints, accumulate=accumulate)
    me = dist.get_rank() if dist.is_initialized() else 0
    done = 0

    def evaluate(number: float | None) -> None:
        with ech.evaluating(model) as evaluation:
            for _ in held_out:
                if number is not None:
                    evaluation.log("accuracy", number + me)
        assert number is None or me or dist.is_initialized() or evaluation.numbers == {"accuracy": number}

    for epoch in range(epochs) if counts else ech.epochs(loader, epochs):
        for x, y in loader:
            if where == "before":
                evaluate(next(logs))
            step(model, optimizer, x, y)
            if where == "after":
                evaluate(next(logs))
            done += 1
            if done == kill_at:
                os.kill(os.getpid(), signal.SIGTERM)
        if logs is not None and not where:
            evaluate(logs[epoch])
    return whole(model)


@pytest.mark.full
def test_the_end_is_saved_and_resumed_from_and_few_stay(tmp_path: Path) -> None:
    for every, expected in {"epoch": [6, 9, 12], 5: [5, 10, 12], 1000: [12], "1h": [12], "0.000001s": [10, 11, 12]}.items():
        folder = tmp_path / str(every)
        _loop(ech.Checkpoints(folder, every=every), 4)
        assert steps_in(folder) == expected, every
    wanted = _loop(None, 5)
    assert largest_difference(_loop(tmp_path / "epoch", 5), wanted) == 0
    assert steps_in(tmp_path / "epoch") == [9, 12, 15]


def _stopped(folder: Path, **options: Any) -> Any:
    try:
        return _loop(folder, 3, layout="ddp", **options)
    except SystemExit as ended:
        return ended.code


@pytest.mark.full
@pytest.mark.fresh_ranks
def test_a_signal_saves_and_the_same_line_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    assert ranks(2, _stopped, folder, kill_at=4) == [75, 75]
    assert steps_in(folder)[-1] == 5  # the update by whose message the ranks agree
    for one, other in zip(ranks(2, _stopped, folder), ranks(2, _stopped, None), strict=True):
        assert largest_difference(one, other) == 0


@pytest.mark.full
def test_the_best_of_a_loops_own_evaluations_stays(ranks: Ranks, tmp_path: Path) -> None:
    """keep=1: the newest and the best; the number is the mean over the ranks, of the weights that were evaluated."""
    best = ech.Checkpoints(tmp_path / "c", keep=1, best="accuracy")
    ranks(2, _loop, best, 4, logs=[1, 3, 2, 0], layout="ddp")
    assert _numbers(tmp_path / "c") == {6: {"accuracy": 3.5}, 12: {"accuracy": 0.5}}
    ranks(2, _loop, best, 5, logs=[1, 3, 2, 0, 9], layout="ddp")  # goes on, with what is known of older ones
    assert _numbers(tmp_path / "c") == {15: {"accuracy": 9.5}}


@pytest.mark.full
def test_a_loop_that_counts_its_epochs_itself_keeps_the_best_too(tmp_path: Path) -> None:
    _loop(ech.Checkpoints(tmp_path, keep=1, best="accuracy"), 4, logs=[1, 3, 2, 0], counts=True)
    assert _numbers(tmp_path) == {6: {"accuracy": 3}, 12: {"accuracy": 0}}


@pytest.mark.full
def test_an_evaluation_within_an_epoch_is_of_the_weights_that_are_saved_or_refused(tmp_path: Path) -> None:
    for where, accumulate, said in (
        ("after", None, None),
        ("before", None, "before its batch was trained on"),
        ("after", 2, "between the batches of an update"),
    ):
        best = ech.Checkpoints(tmp_path / f"{where} {accumulate}", keep=2, best="accuracy")
        with contextlib.nullcontext() if said is None else pytest.raises(UsageError, match=said):
            _loop(best, 2, logs=iter([5.0, 7.0, 6.0] + [0.0] * 9), where=where, accumulate=accumulate)
    found = _numbers(tmp_path / "after None")
    assert {step: each["accuracy"] for step, each in found.items()} == {2: 7.0, 5: 0.0, 6: 0.0}


def _wrong_numbers(folder: Path) -> None:
    model = net()
    best = ech.Checkpoints(folder / "a", best="accuracy")
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), ech.Loader(DATA, 8)
    model, *_ = ech.prepare(*parts, layout="ddp", checkpoints=best)
    with refused(RanksDisagreeError), ech.evaluating(model) as evaluation:
        if dist.get_rank() == 0:
            evaluation.log("accuracy", 1.0)
    with refused(CheckpointOptionError):  # nothing logs it
        _train(ech.Checkpoints(folder / "b", best="f1"), 2, Scored(layout="ddp"))


def test_a_number_of_some_ranks_only_or_of_none_is_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _wrong_numbers, tmp_path)


def test_a_name_that_no_evaluation_logs_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with refused(CheckpointOptionError):
        _loop(ech.Checkpoints(tmp_path, best="f1"), 2, logs=[1, 2])


def _evaluates_late(folder: Path, number: float | None) -> list[str]:
    """What is said of a loop that saves after each update, evaluates at the end of an epoch, and is begun twice."""
    layout = "ddp" if dist.is_initialized() else "none"
    with told() as texts:
        for epochs in (1, 2):
            _loop(ech.Checkpoints(folder, every=1, best="accuracy"), epochs, logs=[number] * 2, layout=layout)
    return [text for text in texts if "accuracy" in text]


@pytest.mark.full
def test_a_number_that_may_still_come_is_not_missed_and_one_that_never_does_is_told_at_the_end(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert _evaluates_late(tmp_path / "one", 0.5) == [] and ranks(2, _evaluates_late, tmp_path / "two", 0.5) == [[], []]
    assert [numbers.get("accuracy") for numbers in _numbers(tmp_path / "one").values()][-1] == 0.5
    first, again = _evaluates_late(tmp_path / "never", None)
    assert first == again and first.startswith(
        "no checkpoint of this run is the best by accuracy, because no evaluation has logged it"
    )


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    _loop(tmp_path, 2)
    model = torch.nn.Linear(3, 1)
    with pytest.raises(CheckpointError):
        ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), ech.Loader(DATA, 8), layout="none", checkpoints=tmp_path)


# --- with a unit


class Scored(Regression):
    """Logs an accuracy in evaluations: what `scores` has for the update that is evaluated, 0 on average over the ranks else."""

    def __init__(self, scores: dict[int, float] | None = None, name: str = "accuracy", **options: Any) -> None:
        super().__init__(optimizer="AdamW", module=net(dropout=0.2), **options)
        self.scores, self.named = scores or {}, name
        self.stops_at: tuple[int, int] | None = None  # an update, and a step of its evaluation

    def on_eval_step_end(self, state: ech.State, data: Any, step: int, loss: Any, outputs: Any) -> None:
        me = dist.get_rank() - 0.5 if dist.is_initialized() else 0.0
        update = self.train_progress.num_updates_completed
        state.log(self.named, self.scores.get(update, 0.0) + me)
        if self.stops_at == (update, self.eval_progress.num_steps_completed_in_epoch):
            os.kill(os.getpid(), signal.SIGTERM)


def _train(checkpoints: Any, epochs: int, unit: Scored | None = None, evaluate: Any = (1,)) -> Any:
    unit = unit or Scored(layout="ddp" if dist.is_initialized() else None)
    held_out = [batch(2, n) for n in evaluate]
    try:
        ech.train(unit, ech.Loader(DATA, 8, seed=1), max_epochs=epochs, eval=held_out or None, checkpoints=checkpoints)
    except SystemExit as ended:
        return ended.code
    return whole(unit.module)


SCORES = {3: 1.0, 6: 3.0, 9: 2.0, 12: 0.0}


def _best_of(folder: Any, epochs: int, scores: dict[int, float] = SCORES, **options: Any) -> Any:
    return _train(ech.Checkpoints(folder, keep=1, best="accuracy", **options), epochs, Scored(scores, layout="ddp"))


@pytest.mark.full
def test_the_best_by_a_logged_number_stays_beside_the_newest_at_any_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for asynchronous in (False, True):
        folder = tmp_path / str(asynchronous)
        ranks(2, _best_of, folder, 4, asynchronous=asynchronous)
        assert _numbers(folder) == {6: {"accuracy": 3.0}, 12: {"accuracy": 0.0}}
        best = ech.Checkpoints(folder, keep=1, best="accuracy", asynchronous=asynchronous)
        _train(best, 5, Scored({15: 2.5}))  # on one rank
        assert _numbers(folder) == {6: {"accuracy": 3.0}, 15: {"accuracy": 2.5}}


@pytest.mark.full
def test_one_line_restores_and_the_numbers_are_those_of_a_run_in_one_go(ranks: Ranks, tmp_path: Path) -> None:
    wanted = ranks(2, _train, None, 4)[0]
    for every in (None, "epoch", 2):
        checkpoints = ech.Checkpoints(tmp_path / str(every), every=every)
        ranks(2, _train, checkpoints, 2)
        assert largest_difference(ranks(2, _train, checkpoints, 4)[0], wanted) == 0
        assert steps_in(tmp_path / str(every)) == {None: [6, 12], "epoch": [6, 9, 12], 2: [8, 10, 12]}[every]


def _stopped_in_evaluation(folder: Path, at: tuple[int, int] | None) -> Any:
    unit = Scored(SCORES, layout="ddp")
    unit.stops_at = at
    return _train(ech.Checkpoints(folder, best="accuracy"), 3, unit, evaluate=range(6))


@pytest.mark.full
@pytest.mark.fresh_ranks
def test_an_evaluation_that_a_signal_cuts_short_gives_no_number_and_the_resumed_one_does(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    assert ranks(2, _stopped_in_evaluation, folder, (6, 2)) == [75, 75]
    assert _numbers(folder) == {3: {"accuracy": 1.0}, 6: {}}
    wanted = ranks(2, _train, None, 3, evaluate=range(6))
    assert largest_difference(ranks(2, _stopped_in_evaluation, folder, None)[0], wanted[0]) == 0
    assert _numbers(folder) == {3: {"accuracy": 1.0}, 6: {"accuracy": 3.0}, 9: {"accuracy": 2.0}}


@pytest.mark.full
def test_the_loss_can_be_the_number_of_evaluations_or_of_training(tmp_path: Path) -> None:
    _train(ech.Checkpoints(tmp_path / "eval", best="loss"), 2)
    assert all(set(each) == {"loss"} for each in _numbers(tmp_path / "eval").values())
    _train(ech.Checkpoints(tmp_path / "train", every="epoch", best="loss"), 2, evaluate=())
    assert all(set(each) == {"loss"} for each in _numbers(tmp_path / "train").values())


@pytest.mark.full
def test_a_number_stays_with_the_weights_that_it_was_measured_of(tmp_path: Path) -> None:
    """Saves between evaluations have none."""
    checkpoints = ech.Checkpoints(tmp_path, every=1, keep=None, best="accuracy")
    _train(checkpoints, 2, Scored(SCORES))
    assert _numbers(tmp_path) == {1: {}, 2: {}, 3: {"accuracy": 1.0}, 4: {}, 5: {}, 6: {"accuracy": 3.0}}


def test_a_unit_that_has_trained_goes_on_from_where_it_stands(tmp_path: Path) -> None:
    unit, loader = Scored(), ech.Loader(DATA, 8)
    ech.train(unit, loader, max_updates=2, checkpoints=tmp_path)
    with torch.no_grad():
        unit.module.get_parameter(next(n for n, _ in unit.module.named_parameters())).zero_()
    changed = whole(unit.module)
    ech.train(unit, loader, max_updates=2, checkpoints=tmp_path)
    assert largest_difference(whole(unit.module), changed) == 0
    other = Scored()
    ech.train(other, ech.Loader(DATA, 8), max_updates=1)
    with refused(CheckpointError):
        ech.train(other, ech.Loader(DATA, 8), max_updates=3, checkpoints=tmp_path)


def _plateau(name: str) -> float:
    unit = Scored(
        {3 * n: float(n) for n in range(1, 9)},
        layout="ddp",
        schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", factor=0.5, patience=0),
        options=ech.UnitOptions(lr_monitor=name),
    )
    _train(None, 3, unit)
    return float(unit.optimizer.param_groups[0]["lr"])


def _plateaus() -> list[Any]:
    with refused(LoopError):
        _plateau("nothing")
    return [_plateau("accuracy"), _plateau("eval_accuracy")]


@pytest.mark.full
def test_a_plateau_scheduler_follows_what_was_logged(ranks: Ranks) -> None:
    """It grows, where less would be better, so each evaluation after the first halves the rate."""
    assert ranks(2, _plateaus) == [[0.025, 0.025]] * 2


@pytest.mark.full
def test_a_trainer_resumes_by_itself(tmp_path: Path) -> None:
    def trained(epochs: int) -> int:
        unit = Scored()
        trainer = ech.Trainer(
            1, accelerator="cpu", max_epochs=epochs, checkpoints=ech.Checkpoints(tmp_path, every="epoch", keep=2)
        )
        trainer.fit(unit, ech.Loader(DATA, 8, seed=1))
        return unit.train_progress.num_updates_completed

    assert (trained(2), steps_in(tmp_path)) == (6, [3, 6])
    assert (trained(3), steps_in(tmp_path)) == (9, [6, 9])
