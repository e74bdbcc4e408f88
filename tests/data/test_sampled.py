"""DataLoaders with a sampler or batch sampler of their own: divided between ranks, drawn as in one process, and resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from echelon.common.errors import LoaderError, RanksDisagreeError
from echelon.data.parts import Padding
from echelon.data.sampled import BatchedLoader, SampledLoader
from echelon.data.torch_loader import as_loader
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.own_loops import own_loop
from tests.kit.refusals import refused

pytestmark = pytest.mark.standing_ranks

ROWS = 23
NUMBERS = TensorDataset(torch.arange(ROWS))


class Epochs(Sampler[int]):
    """In another order for each epoch that it is told."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(ROWS), ROWS))


class Remembers(Epochs):
    """With an RNG of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(ROWS).tolist())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "weighted": lambda: DataLoader(NUMBERS, 4, sampler=WeightedRandomSampler(torch.arange(1.0, ROWS + 1), 30)),
    "with replacement": lambda: DataLoader(NUMBERS, 4, sampler=RandomSampler(NUMBERS, replacement=True, num_samples=9)),
    "a part": lambda: DataLoader(NUMBERS, 4, sampler=RandomSampler(NUMBERS, num_samples=9, generator=_generator())),
    "a subset": lambda: DataLoader(NUMBERS, 4, sampler=SubsetRandomSampler([1, 5, 7, 11, 13, 17]), drop_last=True),
    "told the epoch": lambda: DataLoader(NUMBERS, 4, sampler=Epochs()),
    "with an RNG": lambda: DataLoader(NUMBERS, 4, sampler=Remembers()),
    "batches": lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(Epochs(), 4, drop_last=False)),
    "batches of all sizes": lambda: DataLoader(NUMBERS, batch_sampler=[[3, 1], [5], [2, 4, 6, 8, 10], [7, 9, 11, 13]]),
}


def _made(kind: str, rank: int, ranks: int, accumulate: int = 1, together: int = 1) -> Any:
    torch.manual_seed(11)
    made = as_loader(LOADERS[kind](), 4 * accumulate, accumulate, "", together=together)
    made.set_data_rank(rank, ranks)
    return made


def _numbers(given: Any) -> list[int]:
    return [] if isinstance(given, Padding) else given[0].tolist()  # type: ignore[no-any-return]


def _epoch(loader: Any, epoch: int) -> list[list[int]]:
    loader.set_epoch(epoch)
    return [_numbers(given) for given in loader]


@pytest.mark.parametrize("kind", [*LOADERS])
def test_ranks_share_the_batches_of_one_process(kind: str) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    alone = _made(kind, 0, 1)
    epochs = [_epoch(alone, epoch) for epoch in range(3)]
    assert all(len(each) == len(alone) for each in epochs)
    if kind in ("told the epoch", "batches"):
        assert [sum(each, []) for each in epochs] == [random.Random(e).sample(range(ROWS), ROWS) for e in range(3)]
    if kind == "batches of all sizes":
        assert epochs[2] == list(LOADERS[kind]().batch_sampler)
    for ranks in (2, 3):
        if ranks == 3 and not kind.startswith("batches"):
            continue  # which must share batches of 4 evenly
        of_ranks = [_made(kind, rank, ranks) for rank in range(ranks)]
        for epoch in range(3):
            parts = [_epoch(each, epoch) for each in of_ranks]
            assert [sum(shares, []) for shares in zip(*parts, strict=True)] == epochs[epoch]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


def test_drawing_an_epoch_leaves_all_generators_as_they_are() -> None:
    loader = LOADERS["a part"]()
    made, state = as_loader(loader, 4, 1, ""), loader.sampler.generator.get_state()  # type: ignore[attr-defined]
    drawn = torch.get_rng_state()
    assert len(list(made)) == 3
    assert torch.equal(loader.sampler.generator.get_state(), state) and torch.equal(torch.get_rng_state(), drawn)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [*LOADERS])
def test_a_run_goes_on_with_the_samples_that_are_left_on_any_number_of_ranks(kind: str) -> None:
    whole_run = _made(kind, 0, 1)
    epochs = [_epoch(whole_run, epoch) for epoch in range(3)]
    cut = _made(kind, 0, 2)
    for epoch in range(2):
        _epoch(cut, epoch)
    cut.set_epoch(2)
    taken = iter(cut)
    next(taken)
    state = cut.state_dict()
    again = [_made(kind, rank, 2) for rank in range(2)], [_made(kind, 0, 1)]
    for loaders in again:
        rest = []
        for each in loaders:
            each.load_state_dict(state)
            rest.append([_numbers(given) for given in each])
        joined = [sorted(sum((part[at] for part in rest if at < len(part)), [])) for at in range(len(rest[0]))]
        assert joined == [sorted(each) for each in epochs[2][1:]]


def test_each_rank_may_take_a_batch_in_turn() -> None:
    parts = [_epoch(_made("batches of all sizes", rank, 3, together=3), 0) for rank in range(3)]
    assert parts == [[[3, 1], [7, 9, 11, 13]], [[5], []], [[2, 4, 6, 8, 10], []]]


def test_an_update_of_several_batches_ends_with_padding() -> None:
    made = _made("batches of all sizes", 0, 1, accumulate=3)
    assert isinstance(made, BatchedLoader) and made.global_batch == 15 and made.pads and len(made) == 6
    assert _epoch(made, 0) == [[3, 1], [5], [2, 4, 6, 8, 10], [7, 9, 11, 13], [], []]


class _Endless(Epochs):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class _Names(Epochs):
    def __iter__(self) -> Iterator[Any]:
        return iter(["a"] * ROWS)


class _NoLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


class _OfARank(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, ROWS, self.num_replicas))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(NUMBERS, 4, sampler=_Endless()),
        DataLoader(NUMBERS, 4, sampler=_Names()),
        DataLoader(NUMBERS, 4, sampler=_NoLength()),
        DataLoader(NUMBERS, 4, sampler=_OfARank(NUMBERS, 2, 0)),
        DataLoader(NUMBERS, batch_size=None),
        DataLoader(NUMBERS, 24, sampler=SubsetRandomSampler([1, 2]), drop_last=True),
    ],
)
def test_what_cannot_be_divided_is_refused(loader: DataLoader[Any]) -> None:
    with refused(LoaderError):
        list(as_loader(loader, loader.batch_size or 1, 1, "has an order that cannot be divided"))


class _Length(Epochs):
    def __init__(self) -> None:
        super().__init__()
        self.length = ROWS

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def test_a_sampler_may_have_another_length_in_each_epoch() -> None:
    sampler = _Length()
    made = as_loader(DataLoader(NUMBERS, 4, sampler=sampler), 4, 1, "")
    assert isinstance(made, SampledLoader)
    made.set_data_rank(0, 1)
    assert len(_epoch(made, 0)) == 6
    sampler.length = 9
    assert sum(_epoch(made, 1), []) == [*range(9)]


# --- in training

X, Y = batch(ROWS, 0)
DATA = TensorDataset(X, Y)
SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "weighted": lambda: {"batch_size": 6, "sampler": WeightedRandomSampler(torch.arange(1.0, ROWS + 1), 20)},
    "batches": lambda: {"batch_sampler": [[3, 1], [5], [2, 4, 6, 8, 10], [7, 9, 11, 13], [0, 12, 14], [15]]},
}


def _trained(kind: str, layout: str, folder: str | None = None, stop: int | None = None) -> Any:
    torch.manual_seed(2)
    loader = DataLoader(DATA, **SAMPLERS[kind]())
    saved = None if folder is None else {"checkpoints": folder}
    return whole(own_loop(net(), loader, epochs=2 if stop is None else stop, layout=layout, **saved or {}))


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", [*SAMPLERS])
def test_two_ranks_train_what_one_trains(kind: str, layout: str, ranks: Ranks, tmp_path: Any) -> None:
    alone = _trained(kind, "none")
    if kind == "batches":
        by_hand, optimizer = net(), None
        optimizer = torch.optim.SGD(by_hand.parameters(), 0.1)
        for chosen in [*SAMPLERS[kind]()["batch_sampler"]] * 2:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(by_hand(X[chosen]), Y[chosen]).backward()
            optimizer.step()
        assert largest_difference(alone, whole(by_hand)) < 1e-14
    for trained in ranks(2, _trained, kind, layout):
        assert largest_difference(trained, alone) < 1e-13
    ranks(2, _trained, kind, layout, str(tmp_path), 1)
    for trained in ranks(2, _trained, kind, layout, str(tmp_path)):
        assert largest_difference(trained, alone) < 1e-13


def _apart() -> None:
    import torch.distributed as dist

    class Differs(Epochs):
        def __iter__(self) -> Iterator[int]:
            return iter(random.Random(dist.get_rank()).sample(range(ROWS), ROWS))

    own_loop(net(), DataLoader(DATA, 4, sampler=Differs()), layout="ddp")


def test_ranks_whose_samplers_draw_apart_are_told(ranks: Ranks) -> None:
    def told() -> bool:
        with pytest.raises(RanksDisagreeError, match="sampler draws alike"):
            _apart()
        return True

    assert ranks(2, told) == [True, True]


class Ordered(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


def test_a_stream_is_read_by_one_rank_and_must_be_divided_for_more(ranks: Ranks) -> None:
    alone = whole(own_loop(net(), DataLoader(Ordered(), 6), layout="none", epochs=2))
    assert largest_difference(alone, whole(own_loop(net(), DataLoader(DATA, 6), layout="none", epochs=2))) == 0

    def told() -> bool:
        with refused(LoaderError):
            own_loop(net(), DataLoader(Ordered(), 6), layout="ddp")
        return True

    assert ranks(2, told) == [True, True]


def _of_stream(rows: int, layout: str) -> Any:
    import echelon as ech

    class Some(Ordered):
        def __iter__(self) -> Iterator[Any]:
            return iter([*zip(X, Y, strict=True)][:rows])

    return whole(own_loop(net(), ech.StreamLoader(Some(), 6, shards="stride", tail="keep"), layout=layout, epochs=2))


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("rows", [13, 17, 23])
def test_the_last_samples_of_a_stream_count_once_however_many_ranks_have_one(rows: int, layout: str, ranks: Ranks) -> None:
    alone = whole(own_loop(net(), DataLoader(TensorDataset(X[:rows], Y[:rows]), 6), layout="none", epochs=2))
    for trained in ranks(2, _of_stream, rows, layout):
        assert largest_difference(trained, alone) < 1e-13
