"""TorchTNT's data: which batches of several loaders come, in which order, and that a resumed run sees exactly the rest."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import echelon as ech
from echelon.common.errors import LoaderError, LoopError, RanksDisagreeError, UsageError
from echelon.compat.torchtnt.utils.data import (
    CudaDataPrefetcher,
    DataIterationStrategyRegistry,
    MultiDataLoader,
    MultiIterator,
)
from echelon.compat.torchtnt.utils.data.iterators import (
    AllDatasetBatches,
    DataIterationStrategy,
    InOrder,
    RandomizedBatchSampler,
    RoundRobin,
    StoppingMechanism,
)
from echelon.data.parts import Padding
from tests.conftest import Ranks
from tests.kit import models
from tests.kit.refusals import refused
from tests.kit.units import Regression

ALL = StoppingMechanism.ALL_DATASETS_EXHAUSTED
SMALLEST = StoppingMechanism.SMALLEST_DATASET_EXHAUSTED
RESTART = StoppingMechanism.RESTART_UNTIL_ALL_DATASETS_EXHAUSTED
WRAP = StoppingMechanism.WRAP_AROUND_UNTIL_KILLED

LETTERS = {"a": ["a0", "a1"], "b": ["b0", "b1", "b2", "b3"], "c": ["c0"]}


def _text(batches: Any) -> str:
    return " ".join("+".join(batch.values()) for batch in batches)


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        (RoundRobin(), "a0 b0 c0 a1 b1 b2 b3"),
        (RoundRobin(iteration_order=["c", "b", "a"]), "c0 b0 a0 b1 a1 b2 b3"),
        (RoundRobin(iteration_order=["a", "b", "b"]), "a0 b0 b1 a1 b2 b3"),  # in TorchTNT c, which is left out, hangs it
        (RoundRobin(SMALLEST), "a0 b0 c0 a1 b1"),
        (RoundRobin(RESTART), "a0 b0 c0 a1 b1 c0 a0 b2 c0 a1 b3 c0 a0"),
        (AllDatasetBatches(), "a0+b0+c0 a1+b1 b2 b3"),
        (AllDatasetBatches(SMALLEST), "a0+b0+c0"),
        (AllDatasetBatches(RESTART), "a0+b0+c0 a1+b1+c0 a0+b2+c0 a1+b3+c0"),
        (InOrder(), "a0 a1 b0 b1 b2 b3 c0"),
        (InOrder(["c", "a", "c", "c"]), "c0 a0 a1 c0 c0"),
    ],
)
def test_batches_come_in_the_order_of_the_strategy(strategy: DataIterationStrategy, wanted: str) -> None:
    loader = MultiDataLoader(LETTERS, strategy)
    assert _text(loader) == wanted
    assert _text(loader) == wanted, "the second epoch"
    assert next(loader.current_iterator, None) is None, "it stays at its end"


def test_wrapping_around_never_ends() -> None:
    many = list(itertools.islice(MultiDataLoader(LETTERS, RandomizedBatchSampler(None, WRAP)), 60))
    assert len(many) == 60 and {name for batch in many for name in batch} == set(LETTERS)
    for strategy in (RoundRobin(WRAP), AllDatasetBatches("WRAP_AROUND_UNTIL_KILLED")):  # type: ignore[arg-type]
        with refused(UsageError):
            iter(MultiDataLoader(LETTERS, strategy))


class Counting:
    """A loader with a state of its own."""

    def __init__(self, name: str, many: int) -> None:
        self.name, self.many, self.at = name, many, 0

    def __iter__(self) -> Iterator[str]:
        while self.at < self.many:
            self.at += 1
            yield f"{self.name}{self.at - 1}"
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _theirs(state: dict[str, Any]) -> dict[str, Any]:
    """Without what only echelon has."""
    return {name: value for name, value in state.items() if name != "iterator_position"}


def test_states_have_torchtnts_form() -> None:
    loader = MultiDataLoader({"a": Counting("a", 1), "b": ["b0", "b1"]}, RoundRobin())
    assert loader.state_dict() == {"a": {"at": 0}}
    seen = []
    for batch in loader:
        seen.append((next(iter(batch.values())), _theirs(loader.state_dict())["iterator_state"]))
    assert seen == [
        ("a0", {"finished_dataloaders": [], "cur_dataloader": "a"}),
        ("b0", {"finished_dataloaders": [], "cur_dataloader": "b"}),
        ("b1", {"finished_dataloaders": ["a"], "cur_dataloader": "b"}),
    ]
    loader = MultiDataLoader({"a": Counting("a", 1), "b": ["b0", "b1"]}, InOrder())
    seen = [(next(iter(batch.values())), _theirs(loader.state_dict())["iterator_state"]) for batch in loader]
    assert seen == [
        ("a0", {"iterators_finished": 0, "cur_iterator": "a"}),
        ("b0", {"iterators_finished": 1, "cur_iterator": "b"}),
        ("b1", {"iterators_finished": 1, "cur_iterator": "b"}),
    ]
    for strategy in (AllDatasetBatches(), RandomizedBatchSampler()):
        loader = MultiDataLoader({"a": Counting("a", 1), "b": ["b0", "b1"]}, strategy)
        next(iter(loader))
        assert set(_theirs(loader.state_dict())) == {"a"}


def test_states_that_torchtnt_saved_are_loaded(caplog: pytest.LogCaptureFixture) -> None:
    def after(strategy: DataIterationStrategy, state: dict[str, Any]) -> str:
        loader = MultiDataLoader(LETTERS, strategy)
        loader.load_state_dict({"iterator_state": state})
        return _text(loader)

    assert after(RoundRobin(), {"finished_dataloaders": ["a"], "cur_dataloader": "b"}) == "c0 b0 b1 b2 b3"
    assert after(InOrder(), {"iterators_finished": 1, "cur_iterator": "b"}) == "b0 b1 b2 b3 c0"
    assert after(AllDatasetBatches(), {"other": 1}) == "a0+b0+c0 a1+b1 b2 b3"
    assert after(InOrder(), {"iterators_finished": 1, "cur_iterator": "d"}) == "a0 a1 b0 b1 b2 b3 c0"
    assert "Will not restore InOrderIterator state, since expected dataloader was not found" in caplog.text
    assert after(RoundRobin(), {"finished_dataloaders": [], "cur_dataloader": "d"}) == "a0 b0 c0 a1 b1 b2 b3"
    assert "Did not find d in ['a', 'b', 'c']. Skipping setting cur_dataloader" in caplog.text
    counting = Counting("a", 3)
    loader = MultiDataLoader({"a": counting, "b": Counting("b", 3)}, InOrder())
    loader.load_state_dict({"a": {"at": 2}})
    assert counting.at == 2 and "Skipping loading state dict for dataloader b as there is no corresponding entry" in caplog.text


def test_a_mechanism_is_its_string() -> None:
    assert StoppingMechanism.ALL_DATASETS_EXHAUSTED == "ALL_DATASETS_EXHAUSTED"
    assert _text(MultiDataLoader(LETTERS, AllDatasetBatches("SMALLEST_DATASET_EXHAUSTED"))) == "a0+b0+c0"  # type: ignore[arg-type]


def test_random_draws_follow_weights_seed_and_epoch_alone() -> None:
    def drawn(strategy: RandomizedBatchSampler, epoch: int = 0, many: int = 2000) -> list[str]:
        loader = MultiDataLoader(LETTERS, strategy)
        loader.set_epoch(epoch)
        return [name for batch in itertools.islice(loader, many) for name in batch]

    weights = {"a": 1.0, "b": 3.0, "c": 0.0, "unused": 7.0}
    random.seed(1)
    before = random.getstate()
    first = drawn(RandomizedBatchSampler(weights, WRAP))
    assert random.getstate() == before, "Python's stream is the user's"
    random.seed(2)
    assert drawn(RandomizedBatchSampler(weights, WRAP)) == first
    assert drawn(RandomizedBatchSampler(weights, WRAP, seed=1)) != first
    assert drawn(RandomizedBatchSampler(weights, WRAP), epoch=1) != first
    assert 0.72 < first.count("b") / 2000 < 0.78 and "c" not in first
    # TorchTNT: "Total of weights must be greater than zero", once the others are exhausted.
    assert sorted(_text(MultiDataLoader(LETTERS, RandomizedBatchSampler(weights))).split()) == [*LETTERS["a"], *LETTERS["b"]]
    assert sorted(_text(MultiDataLoader(LETTERS, RandomizedBatchSampler())).split()) == sorted(sum(LETTERS.values(), []))
    loader = MultiDataLoader(LETTERS, RandomizedBatchSampler())
    assert _text(loader) != _text(loader), "a user's own loop, which tells no epoch, gets another order as well"


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (RandomizedBatchSampler({"a": 1.0}), "none for 'b', 'c'"),
        (RandomizedBatchSampler({"a": 1.0, "b": -1.0, "c": 1.0}), "weight of 'b' must be finite and at least 0, got -1.0"),
        (RandomizedBatchSampler({"a": 1.0, "b": float("nan"), "c": 1.0}), "weight of 'b' must be finite and at least 0, got nan"),
        (RandomizedBatchSampler({"a": 0.0, "b": 0.0, "c": 0.0}), "above 0, got only zeros"),
        (RoundRobin(iteration_order=["a", "d"]), "iteration_order"),
        (InOrder([]), "iteration_order"),
        (RoundRobin("ALL"), "stopping_mechanism must be a StoppingMechanism, got 'ALL'"),
        (DataIterationStrategy(), "has no iterator"),
    ],
)
def test_what_cannot_be_is_an_error(strategy: DataIterationStrategy, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        iter(MultiDataLoader(LETTERS, strategy))


def test_making_a_loader_reads_nothing() -> None:
    """TorchTNT reads a batch of each loader to see whether it has one, and an iterator has lost it."""
    used: list[int] = []

    def stream() -> Iterator[int]:
        for i in range(3):
            used.append(i)
            yield i

    loader = MultiDataLoader({"a": stream()}, InOrder())
    assert used == []
    assert [batch["a"] for batch in loader] == [0, 1, 2]
    with refused(LoaderError):
        list(loader)


@pytest.mark.parametrize("nothing", [[], DataLoader([]), "unsized"])
def test_empty_loaders(nothing: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Unsized:
        def __iter__(self) -> Iterator[str]:
            return iter(())

    empty: Any = Unsized() if nothing == "unsized" else nothing
    with refused(LoaderError):
        list(MultiDataLoader({"e": empty, "a": ["a0", "a1"]}, RoundRobin()))
    for strategy in (RoundRobin(SMALLEST), AllDatasetBatches(RESTART), InOrder(["e", "a", "e"]), RandomizedBatchSampler()):
        left = MultiDataLoader({"e": empty, "a": ["a0", "a1"]}, strategy, ignore_empty_data=True)
        assert _text(left) == "a0 a1", strategy
    assert "'e' contains no data and is left out" in caplog.text
    with refused(LoaderError):
        MultiDataLoader({}, RoundRobin())


@pytest.mark.parametrize("may_be_empty", [True, False])
def test_what_can_be_read_once_only_cannot_be_restarted(may_be_empty: bool) -> None:
    loaders = {"a": iter(["a0"]), "b": ["b0", "b1", "b2"]}
    with refused(LoaderError):
        list(MultiDataLoader(loaders, RoundRobin(RESTART), ignore_empty_data=may_be_empty))


class Counted:
    """A loader that knows where it stands, in the way of torchdata's: each `iter` is an epoch, and a state at an end is no
    pass to go on with."""

    def __init__(self, name: str, length: int) -> None:
        self.name, self.length, self.position, self.epoch = name, length, 0, -1
        self._goes_on, self._finished = False, True

    def __iter__(self) -> Iterator[str]:
        if not self._goes_on:
            self.position, self.epoch = 0, self.epoch + 1
        self._goes_on, self._finished = False, False
        return self._read()

    def _read(self) -> Iterator[str]:
        while self.position < self.length:
            self.position += 1
            yield f"{self.name}{self.epoch}.{self.position}"
        self._finished = True

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "epoch": self.epoch, "finished": self._finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.epoch, self._finished = state["position"], state["epoch"], state["finished"]
        self._goes_on = not self._finished


def _loaders(kind: str) -> dict[str, Any]:
    lengths = {"a": 2, "b": 5, "c": 3}
    if kind == "stateful":
        return {name: Counted(name, n) for name, n in lengths.items()}
    if kind == "echelon":
        return {
            name: ech.Loader(list(range(10 * n, 11 * n)), 1, options=ech.data.LoaderOptions(dp=(0, 1)))
            for name, n in lengths.items()
        }
    return {name: DataLoader([f"{name}{i}" for i in range(n)], batch_size=None) for name, n in lengths.items()}


STRATEGIES = [
    RoundRobin(),
    RoundRobin(SMALLEST),
    RoundRobin(RESTART),
    AllDatasetBatches(),
    AllDatasetBatches(RESTART),
    InOrder(),
    InOrder(["b", "a", "b"]),
    RandomizedBatchSampler(),
    RandomizedBatchSampler({"a": 2.0, "b": 1.0, "c": 1.0}, RESTART),
]


KINDS = ("plain", "stateful", "echelon")
# Each kind with each strategy, and managed or not in turn: each of them with each of the others.
TURNS = [(strategy, (i + j) % 2 == 0, kind) for i, strategy in enumerate(STRATEGIES) for j, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("strategy", "managed", "kind"), TURNS, ids=str)
def test_a_resumed_loader_gives_exactly_the_rest(strategy: DataIterationStrategy, managed: bool, kind: str) -> None:
    """At each position of the second epoch; the third follows as it would have. `managed`: as in echelon's loops."""

    def epoch(loader: MultiDataLoader, number: int) -> Iterator[str]:
        if managed:
            loader.set_epoch(number)
        elif kind == "echelon":
            for each in loader.individual_dataloaders.values():
                each.set_epoch(number)
        return (str(batch) for batch in loader)

    whole = MultiDataLoader(_loaders(kind), strategy)
    wanted = [list(epoch(whole, number)) for number in range(3)]
    assert len(wanted[1]) > 3
    for cut in range(len(wanted[1]) + 1):
        old = MultiDataLoader(_loaders(kind), strategy)
        list(epoch(old, 0))
        first = list(itertools.islice(epoch(old, 1), cut))
        state = json.loads(json.dumps(old.state_dict()))
        new = MultiDataLoader(_loaders(kind), strategy)
        new.load_state_dict(state)
        if managed:
            new.set_epoch(1)
        assert new.state_dict() == state, "saved again before anything is read"
        if kind == "echelon" and not managed:
            rest = [str(batch) for batch in new]
        else:
            rest = list(epoch(new, 1))
        assert first + rest == wanted[1], cut
        assert list(epoch(new, 2)) == wanted[2], cut


def test_a_state_at_the_end_of_an_epoch() -> None:
    """A user's own loop goes on with the next epoch, where TorchTNT's has an empty one; echelon's loops say which it is."""
    for managed, wanted in ((False, "a0 b0 c0 a1 b1 b2 b3"), (True, "")):
        old = MultiDataLoader(LETTERS, RoundRobin())
        if managed:
            old.set_epoch(4)
        list(old)
        new = MultiDataLoader(LETTERS, RoundRobin())
        new.load_state_dict(old.state_dict())
        if managed:
            new.set_epoch(4)
        assert _text(new) == wanted
        if managed:
            new.load_state_dict(old.state_dict())
            new.set_epoch(5)
            assert _text(new) == "a0 b0 c0 a1 b1 b2 b3"


def test_a_state_of_other_loaders_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    old = MultiDataLoader(LETTERS, RoundRobin())
    next(iter(old))
    new = MultiDataLoader({"a": ["a0"], "d": ["d0"]}, RoundRobin())
    new.load_state_dict(old.state_dict())
    with refused(LoaderError):
        iter(new)
    with refused(LoaderError):
        new.load_state_dict({"position": 3})
    shorter = MultiDataLoader({"a": [], "b": ["b0"], "c": []}, RoundRobin(), ignore_empty_data=True)
    shorter.load_state_dict(old.state_dict())
    with refused(LoaderError):
        list(shorter)


def test_samplers_are_told_the_epoch_and_shuffle_anew_when_they_begin_again() -> None:
    """TorchTNT tells only a DataLoader's own sampler, so those within a MultiDataLoader have one order for ever."""
    data = list(range(40))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)  # type: ignore[arg-type]
    loaders: dict[str, Any] = {
        "torch": DataLoader(data, batch_size=None, sampler=sampler),  # type: ignore[arg-type]
        "echelon": ech.Loader(data, 1, options=ech.data.LoaderOptions(dp=(0, 1))),
        "long": range(100),
    }
    loader = MultiDataLoader(loaders, AllDatasetBatches(RESTART))
    orders: dict[str, list[tuple[int, ...]]] = {"torch": [], "echelon": []}
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        batches = list(loader)
        for name, found in orders.items():
            values = [int(batch[name]) for batch in batches]
            found += [tuple(values[:40]), tuple(values[40:80])]
    for name, found in orders.items():
        assert all(sorted(order) == data for order in found), name
        assert len(set(found)) == 4, name


def test_padding_stays_padding() -> None:
    """Of a short last batch some ranks have no sample, and compute one that weighs nothing."""

    def short(tail: Any = "keep") -> ech.Loader:
        return ech.Loader(list(range(5)), 4, shuffle=False, tail=tail, options=ech.data.LoaderOptions(dp=(3, 4)))

    batches = list(MultiDataLoader({"a": short(), "b": short()}, RoundRobin()))
    assert [isinstance(batch, Padding) for batch in batches] == [False, False, True, True]
    assert set(batches[2].batch) == {"a"}
    with refused(LoaderError):
        list(MultiDataLoader({"a": short(), "b": range(2)}, AllDatasetBatches()))


def test_an_iterator_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(DataIterationStrategy):
        pass

    class Zip(MultiIterator):
        def __init__(self, individual_dataloaders: Any, iteration_strategy: Any) -> None:
            super().__init__(individual_dataloaders, iteration_strategy)
            self._zip = zip(*individual_dataloaders.values(), strict=False)

        def __next__(self) -> dict[str, Any]:
            return {"both": "".join(next(self._zip))}

    assert _text(MultiDataLoader(LETTERS, Mine(), iterator_cls=Zip)) == "a0b0c0"
    monkeypatch.setitem(DataIterationStrategyRegistry.REGISTRY, Mine, Zip)
    loader = MultiDataLoader(LETTERS, Mine())
    assert _text(loader) == "a0b0c0"
    loader.load_state_dict(loader.state_dict())
    assert _text(loader) == "a0b0c0"


# --- in echelon's loop, on ranks


class Sees(ech.TrainUnit[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(1, 1)
        self.seen: list[str] = []

    def train_step(self, state: Any, data: Any) -> None:
        self.seen += [f"{name}:{batch.tolist()}" for name, batch in data.items()]


def test_the_loop_places_and_checks_the_loaders_within() -> None:
    class Second(Sees):
        @property
        def data_rank_and_size(self) -> tuple[int, int]:  # as under tensor parallelism
            return 1, 2

    unit = Second()
    ech.train(unit, MultiDataLoader({"a": ech.Loader(list(range(8)), 4, shuffle=False)}, InOrder()), max_epochs=1)
    assert unit.seen == ["a:[2, 3]", "a:[6, 7]"]
    uneven = MultiDataLoader({"a": ech.Loader(list(range(5)), 4, options=ech.data.LoaderOptions(dp=(0, 2)))}, InOrder())
    with refused(LoopError):
        ech.train(Sees(), uneven, max_epochs=1)


def _mixed(seed: int = 0) -> MultiDataLoader:
    """Of a Loader that shuffles, a stateless DataLoader with a sampler, and one whose length differs by rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(24)
    sampler: DistributedSampler[Any] = DistributedSampler(rows, num_replicas=size, rank=rank)  # type: ignore[arg-type]
    loaders = {
        "echelon": ech.Loader(rows, 4),  # type: ignore[arg-type]
        "torch": DataLoader(rows, 3, sampler=sampler),  # type: ignore[arg-type]
        "uneven": DataLoader(torch.arange(100, 105 + rank)),  # type: ignore[arg-type]
    }
    return MultiDataLoader(loaders, RandomizedBatchSampler(enforce_same_loader_across_ranks=True, seed=seed))


def _on_ranks(folder: str) -> dict[str, Any]:
    done: dict[str, Any] = {}
    whole = Sees()
    ech.train(whole, _mixed(), max_epochs=2)
    done["whole"] = whole.seen
    saver = ech.DistributedCheckpointSaver(folder, save_every_n_updates=5, keep_last_n_checkpoints=1)
    first, loader = Sees(), _mixed()
    ech.train(first, loader, max_epochs=2, max_updates=20, callbacks=[saver])  # in the middle of the second epoch
    rest, loader = Sees(), _mixed()
    ech.DistributedCheckpointSaver.restore_from_latest(folder, rest, train_dataloader=loader)
    done["restored at"] = rest.train_progress.num_steps_completed
    ech.train(rest, loader, max_epochs=2)
    done["both"] = first.seen + rest.seen
    for name, build in (("seeds", lambda: _mixed(seed=dist.get_rank())), ("empty", _empty_on_one_rank)):
        try:
            list(build())
        except Exception as error:
            done[name] = error
    return done


def _empty_on_one_rank() -> MultiDataLoader:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(range(3 * dist.get_rank()))

    return MultiDataLoader({"a": DataLoader(Stream())}, RandomizedBatchSampler(enforce_same_loader_across_ranks=True))


def test_all_ranks_draw_the_same_loader_and_a_run_goes_on_in_the_middle_of_an_epoch(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    both = ranks(2, _on_ranks, str(tmp_path / "checkpoints"))
    names = [[batch.split(":")[0] for batch in each["whole"]] for each in both]
    assert names[0] == names[1], "the same loader at each step"
    assert {name: names[0].count(name) for name in set(names[0])} == {"echelon": 12, "torch": 8, "uneven": 10}
    for each in both:
        assert each["restored at"] == 20 and each["both"] == each["whole"]
        assert len(set(each["whole"])) > 24, "another order in the second epoch"
        assert isinstance(each["seeds"], RanksDisagreeError)
        assert isinstance(each["empty"], UsageError) and "'a' contains no data" in str(each["empty"])
    assert not set(both[0]["whole"]) & {b for b in both[1]["whole"] if b.startswith("echelon")}


# --- the other parts


def test_the_prefetcher_is_for_gpus() -> None:
    with refused(LoaderError):
        CudaDataPrefetcher([], torch.device("cpu"))
    with refused(LoaderError):
        CudaDataPrefetcher([], torch.device("cuda"), 0)


@pytest.mark.gpu
def test_the_prefetcher_gives_every_batch_on_the_gpu() -> None:
    data = [{"x": torch.full((1000, 1000), float(i)).pin_memory(), "i": i} for i in range(20)]
    read: list[int] = []

    class Read:
        def __iter__(self) -> Iterator[Any]:
            for batch in data:
                read.append(int(batch["i"]))
                yield batch

    for ahead in (1, 3):
        batches = CudaDataPrefetcher(Read(), torch.device("cuda"), ahead)
        assert not read, "nothing is read before it is asked for"
        for _ in range(2):
            sums = []
            for batch in batches:
                assert batch["x"].is_cuda and len(read) == min(20, batch["i"] + 1 + ahead)
                sums.append(batch["x"].mean())
                del batch
                torch.empty(1000, 1000, device="cuda").fill_(-1.0)
            assert [float(s) for s in sums] == [float(i) for i in range(20)]
            read.clear()


class _AsksToStop(ech.Callback):
    def on_eval_step_end(self, state: ech.State, unit: Any) -> None:
        if dist.get_rank() == 0 and unit.eval_progress.num_steps_completed_in_epoch == 3:
            state.stop()


def _stopped_in_an_evaluation() -> int:
    rows = torch.utils.data.TensorDataset(*models.batch(64, 0))
    strategy = RandomizedBatchSampler(enforce_same_loader_across_ranks=True)
    loaders = MultiDataLoader({"a": ech.Loader(rows, 8), "b": ech.Loader(rows, 8)}, strategy)
    unit = Several(layout="ddp")
    ech.fit(unit, ech.Loader(rows, 8), loaders, max_epochs=2, callbacks=[_AsksToStop()])
    return unit.train_progress.num_epochs_completed


class Several(Regression):
    def compute_loss(self, state: ech.State, data: Any) -> Any:
        (data,) = data.values() if isinstance(data, dict) else (data,)
        return super().compute_loss(state, data)


def test_a_rank_that_is_asked_to_stop_does_not_leave_the_others_in_the_loader(ranks: Ranks) -> None:
    assert ranks(2, _stopped_in_an_evaluation, timeout_s=60) == [1, 1]
