"""Datasets that can only be iterated over: exact as far as their own state goes, and refused where it does not."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import echelon as ech
from echelon.common.errors import DataError, LoaderError, UsageError
from tests.conftest import Ranks
from tests.kit.own_loops import step
from tests.kit.refusals import refused


class Counted(IterableDataset[int]):
    """0, 1, ... length - 1, every epoch 1000 more; its place and its position are its own."""

    def __init__(self, length: int = 60) -> None:
        self.length, self.index, self.count, self.epoch, self.at = length, 0, 1, 0, 0
        self.resumed = False

    def set_place(self, index: int, count: int) -> None:
        self.index, self.count = index, count

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.at, self.resumed = (self.at if self.resumed else 0), False
        while self.at * self.count + self.index < self.length:
            self.at += 1
            yield 1000 * self.epoch + (self.at - 1) * self.count + self.index

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"].item() == state["at"]
        self.at, self.resumed = state["at"], True


class Plain:
    """An iterable without place or state."""

    def __init__(self, length: int = 60) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class DividesItself(Plain):
    """Between the workers, as torch's pages have it."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(worker.id, self.length, worker.num_workers) if worker is not None else range(self.length))


class OwnIterator(Plain):
    """The iterator has the state, not the dataset."""

    def __iter__(self) -> Iterator[int]:
        return _Counter(self.length)


class _Counter(Iterator[int]):
    def __init__(self, length: int) -> None:
        self.length, self.state = length, {"at": 0}

    def __next__(self) -> int:
        if self.state["at"] == self.length:
            raise StopIteration
        self.state["at"] += 1
        return self.state["at"] - 1

    def state_dict(self) -> dict[str, int]:
        return self.state  # alive: it goes on changing

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def _stream(dataset: Any, rank: int = 0, ranks: int = 2, **options: Any) -> ech.StreamLoader:
    return ech.StreamLoader(dataset, 8, options=ech.data.StreamOptions(dp=(rank, ranks)), **options)


def _all(loader: ech.StreamLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "shards"), [(Counted, None), (Plain, "stride"), (DividesItself, "stride"), (OwnIterator, "stride")]
)
def test_every_sample_is_seen_once_over_all_ranks_and_workers(kind: Any, shards: Any, workers: int) -> None:
    for length in (64, 61):
        batches = [_all(_stream(kind(length), r, num_workers=workers, tail="keep", shards=shards)) for r in range(2)]
        assert sorted(sum(sum(batches, []), [])) == list(range(length))
        assert {len(b) for rank in batches for b in rank} <= {4, 3, 2, 1}


class Uneven(Counted):
    """The first stream is much shorter; one that has ended would start over if it were asked again."""

    def __iter__(self) -> Iterator[int]:
        start = self.at if self.resumed else 0
        self.resumed = False
        for at in range(start + 1, (8 if self.index == 0 else 40) + 1):
            self.at = at
            yield 100 * self.index + at
        self.at = 0


class AnewAtItsEnd(Counted):
    """Past its last sample it stands at its beginning."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.at = 0


STREAMS: dict[str, tuple[Any, Any, int]] = {
    "alone": (Counted, None, 0),
    "in a worker": (Counted, None, 1),
    "in workers": (Counted, None, 3),
    "of an iterator": (OwnIterator, "stride", 0),
    "of an iterator in a worker": (OwnIterator, "stride", 1),
    "of an iterator in workers": (OwnIterator, "stride", 2),
    "of which one ends early": (Uneven, None, 2),
    "that stands at its beginning at its end": (AnewAtItsEnd, None, 0),
}


@pytest.mark.full(but=("alone", "that stands at its beginning at its end"))
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_goes_on_exactly_wherever_it_was_left(name: str) -> None:
    """Streams of different lengths, so that some have ended; 61 samples over up to three workers of rank 1."""
    kind, shards, workers = STREAMS[name]

    def loader() -> ech.StreamLoader:
        place = (0, 1) if kind is Uneven else (1, 2)
        return _stream(kind(61), *place, num_workers=workers, tail="keep", shards=shards)

    want, first, states = _all(loader()), loader(), []
    assert kind is not Uneven or [batch[0] for batch in want] == [1, 101, 109, 117, 125, 133]
    with contextlib.closing(iter(first)) as batches:
        for _ in want:
            next(batches)
            states.append(first.state_dict())
    for at, state in enumerate(states, 1):
        second = loader()
        second.load_state_dict(state)
        assert at == len(want) or second.seek(at) == at
        assert _all(second) == want[at:]


def test_the_state_before_what_was_read_ahead_is_known_and_epochs_are_the_datasets() -> None:
    loader = _stream(Counted(), 0, 1)
    batches = iter(loader)
    next(batches), next(batches), next(batches)
    assert loader.state_at(2)["ranks"]["0"]["streams"][0]["own"]["at"] == 16
    assert loader.seek(2) == 2
    assert _all(loader)[0] == list(range(16, 24))
    loader.set_epoch(2)
    assert _all(loader)[0] == list(range(2000, 2008))
    assert [len(b) for b in _all(_stream(Counted(61), 0, 1, num_workers=2))] == [
        8
    ] * 6  # of each stream less than a batch is left out


class Sees(ech.TrainUnit[torch.Tensor]):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def train_step(self, state: ech.State, data: torch.Tensor) -> None:
        self.seen.append(data.tolist())


def _saved_and_restored(folder: Path, steps: int, resume: bool, workers: int) -> list[list[int]]:
    unit, loader = Sees(), ech.StreamLoader(Counted(), 8, num_workers=workers)
    if resume:
        assert ech.DistributedCheckpointSaver.restore_from_latest(folder, unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=steps, callbacks=[ech.DistributedCheckpointSaver(folder)])
    return unit.seen


@pytest.mark.full
def test_a_run_over_streams_goes_on_exactly_through_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    """Seven or eight micro-batches make an epoch of a rank; the second run goes from the middle of one into the next."""
    want = ranks(2, _saved_and_restored, tmp_path / "whole", 11, False, 2)
    first = ranks(2, _saved_and_restored, tmp_path / "cut", 4, False, 2)
    rest = ranks(2, _saved_and_restored, tmp_path / "cut", 11, True, 2)
    assert [a + b for a, b in zip(first, rest, strict=True)] == want
    assert want[0][-1][0] >= 1000 and not set(sum(want[0], [])) & set(sum(want[1], []))


def _trained_on(count: int, workers: int) -> tuple[int, int]:
    """Updates of two epochs over a stream of so many samples, and how many samples this rank has trained on."""
    model, seen = torch.nn.Linear(1, 1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader: Any = ech.StreamLoader(Plain(count), 8, shards="stride", num_workers=workers)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="ddp")
    updates = 0
    for _ in ech.epochs(loader, 2):
        for x in loader:
            seen += len(x)
            updates += step(model, optimizer, x[:, None].float(), loss=lambda model, x: model(x).square().mean()).is_last
    return updates, seen


@pytest.mark.parametrize(("count", "workers"), [(48, 0), (47, 0), (9, 0), (7, 0), pytest.param(95, 2, marks=pytest.mark.full)])
def test_what_not_all_ranks_have_is_dropped_with_the_tail(ranks: Ranks, count: int, workers: int) -> None:
    """Of 47 samples one rank has 24, six micro-batches of 4, and the other 23: five are trained on."""
    updates = 2 * (count // 2 // 4 if not workers else 11)  # of four streams the last has five
    assert ranks(2, _trained_on, count, workers) == [(updates, 4 * updates)] * 2


def _workers_left() -> int:
    gc.disable()  # which would end them, too, but with torch's five seconds of patience for each
    try:
        ech.train(Sees(), ech.StreamLoader(Counted(), 8, num_workers=2), max_updates=3)
        return len(multiprocessing.active_children())
    finally:
        gc.enable()


@pytest.mark.full
def test_workers_end_with_a_run_that_ends_within_an_epoch(ranks: Ranks) -> None:
    assert ranks(2, _workers_left) == [0, 0]


def _other_world(folder: Path) -> str:
    try:
        _saved_and_restored(folder, 6, True, 0)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_another_number_of_ranks_is_refused_on_all_of_them(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _saved_and_restored, tmp_path / "c", 4, False, 0)
    for said in ranks(4, _other_world, tmp_path / "c"):
        assert "streams of Counted cannot resume: dp_size was 2, is 4" in said


def test_other_workers_or_another_split_are_refused() -> None:
    first = _stream(Counted(), num_workers=0)
    next(iter(first))
    second = _stream(Counted(), num_workers=2, accumulation=2)
    second.load_state_dict(first.state_dict())
    with refused(LoaderError):
        list(second)


def test_streams_that_would_begin_anew_in_mid_epoch_are_refused_and_others_lose_nothing() -> None:
    for first, second in ((_stream(Plain(), 0, 1), None), (_stream(Counted(), 0, 1), _stream(Counted(), 0, 1))):
        unit = Sees()
        ech.train(unit, first, max_updates=3)
        with refused(LoaderError):
            ech.train(unit, second or first, max_updates=5)
    unit, loader = Sees(), _stream(Counted(64), 0, 1)
    ech.train(unit, loader, max_updates=3)
    ech.train(unit, loader, max_epochs=1)
    assert sum(unit.seen, []) == list(range(64))


def test_ranks_and_workers_that_would_read_the_same_or_cannot_divide_are_refused() -> None:
    for data, options in ((Plain(), {"ranks": 2}), (Plain(), {"ranks": 1, "num_workers": 2}), (Counted(), {"ranks": 3})):
        with refused(LoaderError):
            list(_stream(data, **options))
    assert len(_all(_stream(Plain(), shards="itself"))) == 15  # each rank all of them, if the dataset is trusted to divide itself
    with refused(LoaderError):
        _stream(Plain(), shards="set_place")


class Torn(Plain):
    def __iter__(self) -> Iterator[int]:
        yield from range(9)
        raise ValueError("the line is torn")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_stream_is_named(workers: int) -> None:
    with refused(DataError) as caught:
        list(_stream(Torn(), 0, 1, num_workers=workers))
    assert ("In worker 0" in str(caught.value)) == bool(workers)
