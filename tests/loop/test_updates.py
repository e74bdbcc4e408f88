"""One unit of count: limits, evaluations, checkpoints, schedules and records count updates, whatever each accumulates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import echelon as ech
from echelon.common.errors import LoaderError, LoopError, UsageError
from echelon.contracts.events import read_lines
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, plain_training, whole
from tests.kit.own_loops import step
from tests.kit.refusals import refused
from tests.kit.run_folders import recorded
from tests.kit.saving import steps_in
from tests.kit.units import Hooks, Numbers, Regression

pytestmark = pytest.mark.standing_ranks

DATA = torch.utils.data.TensorDataset(*batch(40, 0))
Saver = ech.DistributedCheckpointSaver


def _counts(unit: Any) -> tuple[int, int]:
    return unit.train_progress.num_updates_completed, unit.train_progress.num_steps_completed


class Heard(ech.Callback):
    """After how many updates each thing happened."""

    may_stop = False

    def __init__(self) -> None:
        self.evaluated: list[int] = []
        self.epochs: list[int] = []

    def on_eval_end(self, state: ech.State, unit: Any) -> None:
        self.evaluated.append(unit.train_progress.num_updates_completed)

    def on_train_epoch_end(self, state: ech.State, unit: Any) -> None:
        self.epochs.append(unit.train_progress.num_updates_completed)


def _each_way(folder: Path) -> dict[str, tuple[dict[str, torch.Tensor], tuple[int, int], list[int]]]:
    """The accumulation is said by the loader, by the unit, or by both."""
    found = {}
    for way in ("train", "fit", "Trainer", "said twice", "by the unit"):
        unit = Regression(layout="ddp", accumulate=2 if way in ("said twice", "by the unit") else None)
        loader = ech.Loader(DATA, 8, seed=1, accumulate=None if way == "by the unit" else 2)
        saver = Saver(folder / way, save_every_n_updates=2)
        if way == "fit":
            ech.fit(unit, loader, [batch(2, 1)], max_updates=5, callbacks=[saver])
        elif way == "Trainer":
            ech.Trainer(max_updates=5, callbacks=[saver]).fit(unit, loader)
        else:
            ech.train(unit, loader, max_updates=5, callbacks=[saver])
        found[way] = whole(unit.module), _counts(unit), steps_in(folder / way)
    return found


@pytest.mark.full
def test_each_way_to_train_makes_as_many_updates_as_it_is_told(ranks: Ranks, tmp_path: Path) -> None:
    order = ech.Loader(DATA, 8, seed=1, options=ech.data.LoaderOptions(dp=(0, 1))).order
    x, y = DATA.tensors
    rows = [torch.as_tensor(order.at(0, torch.arange(8 * k, 8 * k + 8).numpy())) for k in range(5)]
    want = plain_training([[(x[each], y[each])] for each in rows])[0]
    for of_rank in ranks(2, _each_way, tmp_path):
        for way, (got, counts, names) in of_rank.items():
            assert largest_difference(got, want) < 1e-12, way
            assert counts == (5, 10), way
            assert names == [2, 4, 5], way


class Rows(IterableDataset[Any]):
    """Twenty samples, with a position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        x, y = batch(20, 0)
        while self.at < 20:
            self.at += 1
            yield x[self.at - 1], y[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


KINDS = ["list", "stream", "loader"]


def _ten(kind: str) -> Any:
    """Ten micro-batches an epoch."""
    if kind == "list":
        return [batch(2, i) for i in range(10)]
    if kind == "stream":
        return ech.StreamLoader(Rows(), 6, accumulate=3)
    return ech.Loader(DATA, 12, seed=1, accumulate=3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_epochs_short_last_update_is_one_and_a_second_call_goes_on(kind: str) -> None:
    """Ten micro-batches and three to an update make four updates an epoch; a limit may end one in its middle."""
    options = {"gradient_accumulation_steps": 3} if kind == "list" else {}
    once, heard = Regression(**options), Heard()
    ech.train(once, _ten(kind), max_updates=10, callbacks=[heard])
    assert _counts(once)[0] == once.window.updates == 10 and heard.epochs == [4, 8]
    assert once.train_progress.num_epochs_completed == 2 and (kind != "list" or _counts(once)[1] == 26)
    twice, loader = Regression(**options), _ten(kind)
    for limit in (2, 7, 10):
        ech.train(twice, loader, max_updates=limit)
        assert twice.train_progress.num_updates_completed == limit
    if kind != "list":
        assert largest_difference(whole(twice.module), whole(once.module)) == 0 and _counts(twice) == _counts(once)


@pytest.mark.parametrize("way", ["unit", "loop"])
def test_a_hook_sees_the_gradient_of_a_short_last_batch_as_it_is(way: str) -> None:
    """Such as one that clamps it, which a factor before it would change."""
    x, y = batch(20, 0)
    batches = [(x[at : at + 8], y[at : at + 8]) for at in (0, 8, 16)] * 2

    def clamped() -> Any:
        model = net()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return model

    plain, model = clamped(), clamped()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(inputs), targets).backward()
        optimizer.step()

    if way == "unit":
        make = lambda module: torch.optim.SGD(module.parameters(), lr=0.1)  # noqa: E731
        ech.train(Regression(module=model, optimizer=make), batches, max_epochs=1)
        trained = model
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained, optimizer, loader = ech.prepare(model, optimizer, batches, layout=None)
        for inputs, targets in loader:
            step(trained, optimizer, inputs, targets, loss=lambda model, x, y: nn.functional.mse_loss(model(x), y))
    assert largest_difference(whole(trained), whole(plain)) == 0


def test_an_epoch_may_be_of_so_many_updates() -> None:
    unit, heard = Regression(accumulate=3), Heard()
    ech.train(unit, _ten("list"), max_epochs=3, updates_per_epoch=2, callbacks=[heard])
    assert heard.epochs == [2, 4, 6] and _counts(unit) == (6, 18)
    more = Regression(accumulate=3)
    ech.train(more, _ten("list"), max_epochs=2, updates_per_epoch=4)  # of which the last is short
    assert _counts(more) == (8, 20) and more.train_progress.num_epochs_completed == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_updates": 7, "eval_every": 3}, [3, 6, 7]),
        ({"max_epochs": 2, "eval_every": 3}, [3, 6, 8]),  # the end, too
        ({"max_epochs": 2}, [4, 8]),
        ({"max_updates": 6}, [4, 6]),
        ({"max_epochs": 2, "eval_every": 4}, [4, 8]),  # once each
    ],
)
def test_evaluations_are_after_so_many_updates(options: dict[str, Any], expected: list[int]) -> None:
    unit, heard = Regression(accumulate=3), Heard()
    ech.train(unit, _ten("list"), eval=[batch(3, 9)], callbacks=[heard], **options)
    assert heard.evaluated == expected
    for wrong in ("epochs", 0, 2.5, True):
        with refused(LoopError):
            ech.train(unit, _ten("list"), eval=[batch(3, 9)], **{**options, "eval_every": wrong})


def test_the_schedule_and_the_records_go_by_updates(tmp_path: Path) -> None:
    def halved(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    unit = Regression(accumulate=3, step_lr_interval="step", schedule=halved)
    with recorded(tmp_path) as run:
        ech.train(unit, _ten("list"), max_updates=6, eval=[batch(3, 9)], eval_every=4)
    records = read_lines(run.metrics)
    assert [(r["step"], r["lr"]) for r in records if "loss" in r] == [(n + 1, 0.1 * 0.5 ** (n // 2)) for n in range(6)]
    assert [r["step"] for r in records if "eval_loss" in r] == [4, 6]
    events = {e["event"]: e for e in read_lines(run.events(0))}
    assert events["train_start"]["total_steps"] == 6 and events["train_end"]["step"] == 6


def test_a_run_that_begins_within_a_window_counts_whole_ones(tmp_path: Path) -> None:
    def fail(state: ech.State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == 2:
            raise KeyError("once")

    unit = Regression(accumulate=3)
    with pytest.raises(KeyError):
        ech.train(unit, _ten("list"), max_epochs=1, callbacks=[Hooks(on_train_step_end=fail)])
    with recorded(tmp_path) as run:
        ech.train(unit, _ten("list"), max_epochs=2)
    (begins,) = (each for each in read_lines(run.events(0)) if each["event"] == "train_start")
    assert begins["total_steps"] == 8


class Two(ech.TrainUnit[Any]):
    """Two optimizers, each of which steps in every training step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()
        self.first_optimizer = torch.optim.SGD(self.first.parameters(), 0.1)
        self.second_optimizer = torch.optim.SGD(self.second.parameters(), 0.1)

    def train_step(self, state: ech.State, data: Any) -> None:
        for module, optimizer in ((self.first, self.first_optimizer), (self.second, self.second_optimizer)):
            optimizer.zero_grad()
            (module(data[0]) - data[1]).square().mean().backward()
            optimizer.step()


class ByHand(Regression):
    """An AutoUnit whose own step makes an update of each batch, whatever its window would."""

    def train_step(self, state: ech.State, data: Any) -> Any:
        loss, out = self.compute_loss(state, data)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), out


class Pairs(Regression):
    """Fetches two batches for a step."""

    def get_next_train_batch(self, state: ech.State, data_iter: Iterator[Any]) -> Any:
        (x, y), (u, v) = next(data_iter), next(data_iter)
        return torch.cat([x, u]), torch.cat([y, v])


class Iterates(Numbers):
    def train_step(self, state: ech.State, data: Iterator[Any]) -> Any:  # type: ignore[override]
        self.seen.append(next(data))
        return None


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (Two, 5),
        (Iterates, 5),
        (lambda: ByHand(accumulate=3), 5),
        (lambda: Regression(accumulate=3), 13),
        (lambda: Pairs(accumulate=2), 9),  # five steps an epoch, three updates
    ],
)
def test_a_step_of_ones_own_is_an_update_unless_a_window_says_otherwise(make: Any, steps: int, tmp_path: Path) -> None:
    unit, saver = make(), Saver(tmp_path, save_every_n_updates=2)
    ech.train(unit, _ten("list"), max_updates=5, callbacks=[saver])
    assert _counts(unit) == (5, steps)
    assert steps_in(tmp_path) == [2, 4, 5]


class Empty(Regression):
    def weight(self, data: Any) -> float:
        return 0.0 if float(data[0][0, 0]) == float(batch(2, 1)[0][0, 0]) else 2.0


def test_an_update_that_is_left_out_is_counted(tmp_path: Path) -> None:
    """Its global batch weighs nothing, or fp16 overflows: the next update has the next global batch all the same."""
    unit = Empty()
    ech.train(unit, [batch(2, i) for i in range(4)], max_updates=3, callbacks=[Saver(tmp_path, save_every_n_updates=1)])
    assert _counts(unit) == (3, 3) and steps_in(tmp_path) == [1, 2, 3]
    half = Regression(module=net(dtype=torch.float32), precision="fp16", accumulate=2)
    data = [tuple(each.float() * (1e30 if i < 2 else 1) for each in batch(2, i)) for i in range(6)]
    ech.train(half, data, max_updates=3)
    assert _counts(half) == (3, 6)


def _saved_and_resumed(folder: Path, accumulation: int, size: int, limits: list[int]) -> dict[str, Any]:
    unit, loader = Regression(layout="ddp", optimizer="AdamW"), ech.Loader(DATA, 8, seed=1, accumulate=accumulation)
    Saver.restore_from_latest(folder, unit, train_dataloader=loader)
    for limit in limits:
        ech.train(unit, loader, max_updates=limit, callbacks=[Saver(folder, save_every_n_updates=2)])
    return {"module": whole(unit.module), "counts": _counts(unit), "names": steps_in(folder)}


@pytest.mark.full
@pytest.mark.parametrize("accumulations", [(1, 2), (2, 4), (4, 1), (2, 1)])
def test_a_run_goes_on_elsewhere_with_other_micro_batches(ranks: Ranks, tmp_path: Path, accumulations: tuple[int, int]) -> None:
    """In the middle of an epoch of five updates, twice; the loader alone says how many micro-batches there are."""
    before, after = accumulations
    want = ranks(2, _saved_and_resumed, tmp_path / "once", before, 2, [13])[0]
    ranks(2, _saved_and_resumed, tmp_path / "c", before, 2, [3])
    (got,) = ranks(1, _saved_and_resumed, tmp_path / "c", after, 1, [8, 13])
    assert largest_difference(got["module"], want["module"]) < 1e-12
    assert got["counts"] == (13, 13 * after)
    assert got["names"][:2] == [2, 3] and got["names"][-1] == 13


def _own(folder: Path, layout: str, accumulate: int, leaves_out: int) -> tuple[list[tuple[int, bool]], list[int]]:
    """Rows of each micro-batch and whether it ends an update. A batch that a loop leaves out is no update."""
    module, rows = net(), []
    optimizer: Any = torch.optim.SGD(module.parameters(), 0.1)
    saver = Saver(folder, save_every_n_updates=2)
    loader: Any = ech.Loader(DATA, 8, seed=1)
    model, optimizer, loader = ech.prepare(module, optimizer, loader, layout=layout, accumulate=accumulate, checkpoints=saver)
    for _ in ech.epochs(loader, 2):
        for n, (x, y) in enumerate(loader):
            if n >= leaves_out:
                rows.append((len(x), step(model, optimizer, x, y).is_last))
    return rows, steps_in(folder)


def test_a_loop_of_ones_own_counts_the_updates_that_it_makes_and_splits_batches_as_prepare_is_told(
    ranks: Ranks, tmp_path: Path
) -> None:
    names = [2, 4, 6, 8, 10]
    assert ranks(2, _own, tmp_path / "a", "ddp", 2, 2) == [([(2, False), (2, True)] * 8, names[:4])] * 2
    assert _own(tmp_path / "b", "none", 4, 0) == ([(2, False), (2, False), (2, False), (2, True)] * 10, names)
    other = net()
    with refused(LoaderError):
        ech.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1), ech.Loader(DATA, 8, accumulate=2), accumulate=4)


OLDER: list[tuple[Any, list[str]]] = [
    (lambda data, folder: ech.train(Regression(), data, max_steps=3), ["train(max_steps=...) is now max_updates=..."]),
    (lambda data, folder: ech.train(Regression(), data, max_epochs=2, max_steps_per_epoch=4), ["updates_per_epoch"]),
    (
        lambda data, folder: ech.fit(
            Regression(), data, data, max_steps=2, max_train_steps_per_epoch=2, evaluate_every_n_steps=1
        ),
        ["max_updates", "updates_per_epoch", "evaluate_every_n_updates"],
    ),
    (lambda data, folder: Saver(folder, save_every_n_train_steps=3), ["save_every_n_updates"]),
    (lambda data, folder: ech.Trainer(max_steps=2), ["max_updates"]),
    (lambda data, folder: ech.Loader(DATA, 8, accumulation=4), ["Loader(accumulation=...) is now accumulate="]),
]


def test_older_words_say_the_new_ones(tmp_path: Path) -> None:
    data = [batch(2, i) for i in range(8)]
    for call, words in OLDER:
        with pytest.warns(DeprecationWarning) as told:
            call(data, tmp_path)
        said = " ".join(str(each.message) for each in told)
        assert all(word in said for word in words), words
    assert ech.Trainer(max_updates=2).max_updates == 2
    with refused(UsageError):
        ech.train(Regression(), data, max_step=3)  # type: ignore[call-arg]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda unit, data, folder: ech.train(unit, data, max_steps=10),
        lambda unit, data, folder: ech.train(unit, data, max_epochs=1, max_steps_per_epoch=6),
        lambda unit, data, folder: ech.fit(unit, data, data, max_epochs=1, evaluate_every_n_steps=3),
        lambda unit, data, folder: ech.Trainer(max_updates=1, evaluate_every_n_steps=9).fit(unit, data),
        lambda unit, data, folder: ech.train(unit, data, max_updates=1, callbacks=[Saver(folder, save_every_n_train_steps=30)]),
    ],
)
def test_older_words_are_refused_where_they_would_count_something_else(call: Any, tmp_path: Path) -> None:
    data = [batch(2, i) for i in range(8)]
    with refused(LoopError):
        call(Regression(accumulate=3), data, tmp_path)
    ech.train(Regression(accumulate=3), data, max_steps=math.inf, max_epochs=1)  # no limit, in either unit


def test_the_accumulation_is_said_once() -> None:
    loader = ech.Loader(DATA, 8)
    for accumulate, steps in ((4, 8), (None, 2), (2, 4)):  # of whatever unit comes
        ech.train(unit := Regression(accumulate=accumulate), loader, max_updates=2)
        assert _counts(unit) == (2, steps)
    with refused(LoaderError):
        ech.train(Regression(accumulate=2), ech.Loader(DATA, 8, accumulate=4), max_updates=1)
    unit = Regression()
    for accumulation in (4, 2, 4):  # of whatever loader comes
        ech.train(unit, ech.Loader(DATA, 8, accumulate=accumulation), max_updates=unit.train_progress.num_updates_completed + 2)
    assert unit.train_progress.num_updates_completed == 6 and unit.window.updates == 6


class _FailsOnce(Regression):
    """Fails in its second update, in that update's last micro-batch: "forward" or "backward"."""

    where, left = "forward", 0

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        loss, outputs = super().compute_loss(state, data)
        self.left -= 1
        if self.left == 0 and self.where == "forward":
            raise FloatingPointError("once")
        if self.left == 0:
            self.module.get_parameter("first.weight").register_hook(self._fail)
        return loss, outputs

    def _fail(self, gradient: torch.Tensor) -> None:
        if self.left == 0:
            raise FloatingPointError("once")


def _caught(folder: Path | None, layout: str, where: str, accumulate: int) -> tuple[dict[str, torch.Tensor], tuple[int, int]]:
    unit = _FailsOnce(layout=layout, accumulate=accumulate)
    unit.where, unit.left = where, 2 * accumulate
    loader = ech.Loader(DATA, 8, shuffle=False)
    savers: list[Any] = [] if folder is None else [Saver(folder, save_every_n_updates=1)]
    with pytest.raises(FloatingPointError):
        ech.train(unit, loader, max_updates=4, callbacks=savers)
    if folder is not None:
        assert Saver.restore_from_latest(folder, unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=4)
    return whole(unit.module), _counts(unit)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_micro_batch_that_failed_comes_again_if_the_caller_trains_on(ranks: Ranks, tmp_path: Path, accumulate: int) -> None:
    """With the others of its update, whose gradients it may have spoilt; also where a checkpoint was restored in between."""
    x, y = DATA.tensors
    want, _, _ = plain_training([[(x[i : i + 8], y[i : i + 8])] for i in range(0, 32, 8)])
    cases = [(2, None, "ddp", "forward"), (2, tmp_path, "fsdp", "forward"), (1, None, "none", "backward")]
    for size, folder, layout, where in cases:
        for got, counts in ranks(size, _caught, folder, layout, where, accumulate):
            assert counts == (4, 4 * accumulate)
            assert largest_difference(got, want) < 1e-12
