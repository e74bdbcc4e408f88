"""Rules of truth 1 and 2 in the loader: the samples of a global batch depend on nothing but (seed, epoch, k)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import echelon as ech
from echelon.common.errors import DatasetError, LoaderError
from echelon.data.loader import Padding, share
from echelon.data.prefetch import Feed
from echelon.data.text import ByteText, split_files
from tests.conftest import Ranks
from tests.kit.refusals import refused


class Numbers:
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def _batches(loader: ech.Loader) -> list[list[int]]:
    """Each micro-batch as a list of samples; padding is an empty one."""
    return [[] if isinstance(b, Padding) else b.tolist() for b in loader]


def _global_batches(
    length: int, size: int, ranks: int, accumulation: int, epoch: int = 0, *, state: Any = None, **options: Any
) -> list[list[int]]:
    """The global batches as sets of samples, put together from what every rank sees; of a loader that goes on from `state`."""
    per_rank = []
    for rank in range(ranks):
        place = ech.data.LoaderOptions(dp=(rank, ranks))
        loader = ech.Loader(Numbers(length), size, accumulate=accumulation, options=place, **options)
        if state is not None:
            loader.load_state_dict(state)
        loader.set_epoch(epoch)
        per_rank.append(_batches(loader))
    micro = [sum((per_rank[r][m] for r in range(ranks)), []) for m in range(len(per_rank[0]))]
    return [sorted(sum(micro[k : k + accumulation], [])) for k in range(0, len(micro), accumulation)]


@given(samples=st.integers(0, 1000), parts=st.integers(1, 50))
def test_shares_are_disjoint_whole_and_nearly_equal(samples: int, parts: int) -> None:
    shares = [share(samples, p, parts) for p in range(parts)]
    assert [start for start, _ in shares[1:]] == [stop for _, stop in shares[:-1]]
    assert shares[0][0] == 0 and shares[-1][1] == samples
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1


@given(length=st.integers(24, 300), epoch=st.integers(0, 3), seed=st.integers(0, 50), tail=st.sampled_from(["keep", "drop"]))
def test_global_batches_do_not_depend_on_ranks_or_accumulation(length: int, epoch: int, seed: int, tail: str) -> None:
    """And have every sample once an epoch."""
    want = _global_batches(length, 24, 1, 1, epoch, seed=seed, tail=tail)
    seen = sorted(sum(want, []))
    assert seen == list(range(length)) if tail == "keep" else len(set(seen)) == len(seen) == length // 24 * 24
    assert len(want) == (-(-length // 24) if tail == "keep" else length // 24)
    for ranks, accumulation in ((2, 1), (1, 2), (4, 3), (3, 2)):
        assert _global_batches(length, 24, ranks, accumulation, epoch, seed=seed, tail=tail) == want


@pytest.mark.full
@given(length=st.integers(24, 120), at=st.integers(0, 5))
def test_micro_batches_are_where_positions_of_says(length: int, at: int) -> None:
    """Whole global batches are computed together, the tail one by one: the same places."""
    for rank in range(2):
        loader = ech.Loader(Numbers(length), 12, accumulate=3, options=ech.data.LoaderOptions(dp=(rank, 2)))
        loader.seek(at)
        want = [loader.order.at(0, np.arange(*loader.positions_of(m, rank))).tolist() for m in range(at, len(loader))]
        assert _batches(loader) == want


def test_a_rank_without_a_sample_gets_padding_and_equal_length() -> None:
    loaders = [ech.Loader(Numbers(9), 8, options=ech.data.LoaderOptions(dp=(r, 4))) for r in range(4)]
    batches = [list(loader) for loader in loaders]
    assert [len(b) for b in batches] == [2] * 4
    assert [isinstance(b[-1], Padding) for b in batches] == [False, True, True, True]
    assert all(loader.pads for loader in loaders)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_tail_that_is_filled_leaves_no_rank_without_a_sample(accumulate: int) -> None:
    """Of lengths with no tail, one that is too short, and one that is long enough."""
    for length in range(24, 32):
        options = [ech.data.LoaderOptions(dp=(r, 3)) for r in range(3)]
        loaders = [ech.Loader(Numbers(length), 12, shuffle=False, accumulate=accumulate, options=each) for each in options]
        for loader in loaders:
            loader.fills_tail = True
        batches = [_batches(loader) for loader in loaders]
        assert all(len(each) > 0 for rank in batches for each in rank)
        assert [i for each in zip(*batches, strict=True) for rank in each for i in rank] == list(range(length))


@given(at=st.integers(0, 5), epoch=st.integers(0, 3))
def test_a_restored_loader_goes_on_where_the_saved_one_stood(at: int, epoch: int) -> None:
    """In the middle of a global batch on as many ranks, between two on any."""
    want = _global_batches(131, 24, 1, 1, epoch)
    loader = ech.Loader(Numbers(131), 24, accumulate=2, options=ech.data.LoaderOptions(dp=(0, 1)))
    loader.set_epoch(epoch)
    micro = _batches(loader)
    loader.set_epoch(epoch + 1)
    loader.set_epoch(epoch)
    iterator, before = iter(loader), torch.get_rng_state()
    for _ in range(2 * at):
        next(iterator)
    for ranks, accumulation in ((1, 2), (3, 4), (2, 1)):
        assert _global_batches(131, 24, ranks, accumulation, epoch, state=loader.state_dict()) == want[at:]
    next(iterator)
    fresh = ech.Loader(Numbers(131), 24, accumulate=2, num_workers=2 * (at == 0), options=ech.data.LoaderOptions(dp=(0, 1)))
    fresh.load_state_dict(loader.state_dict())
    fresh.set_epoch(epoch)  # as the loop does
    assert _batches(fresh) == micro[2 * at + 1 :] and torch.equal(before, torch.get_rng_state())


def test_a_global_batch_that_ranks_cannot_divide_names_those_that_can() -> None:
    loader = ech.Loader(Numbers(100), 12, accumulate=2, options=ech.data.LoaderOptions(dp=(0, 4)))
    with refused(LoaderError):
        len(loader.dp)


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "size", "options"),
    [
        (Numbers(7), 8, {"tail": "drop"}),
        (Endless(), 8, {}),
        (range(8), 2.5, {}),
        (range(8), None, {"batch_size": 4}),
        (range(8), 4, {"gradient_accumulation_steps": 2}),
        (range(8), 4, {"drop_last": True}),
    ],
)
def test_what_makes_no_loader_is_refused_by_name(data: Any, size: Any, options: dict[str, Any]) -> None:
    with refused(LoaderError):
        ech.Loader(data, *([size] if size is not None else []), **options)


@pytest.mark.parametrize("asked", [3, 6], ids=["a unit that counts its steps", "one that knows of windows"])
def test_another_accumulation_and_global_batch_go_on_behind_the_same_samples(asked: int) -> None:
    state = ech.Loader(Numbers(80), 8, shuffle=False).state_at(3)
    options = ech.data.LoaderOptions(accept_changes={"global_batch"})
    loader = ech.Loader(Numbers(80), 6, shuffle=False, accumulate=2, options=options)
    loader.load_state_dict(state)
    assert loader.seek(asked) == 8 and next(iter(loader)).tolist() == [24, 25, 26]


def test_there_may_be_fewer_samples_than_a_global_batch_and_a_size_may_be_a_whole_float() -> None:
    assert _batches(ech.Loader(Numbers(7), 8 / 1, shuffle=False)) == [[0, 1, 2, 3, 4, 5, 6]]  # type: ignore[arg-type]
    (shuffled,) = _batches(ech.Loader(Numbers(7), 8))
    assert sorted(shuffled) == [0, 1, 2, 3, 4, 5, 6]
    assert [len(each) for each in ech.Loader(torch.arange(8), 4)] == [4, 4]


def test_the_feed_knows_the_last_batch_with_and_without_a_length_and_reads_no_further() -> None:
    for loader in ([1, 2, 3], iter([1, 2, 3])):
        assert [(step.batch, step.is_last) for step in Feed(loader)] == [(1, False), (2, False), (3, True)]
    source = iter(range(10))
    assert [(step.batch, step.is_last) for step in Feed(source, limit=3)] == [(0, False), (1, False), (2, True)]
    assert next(source) == 3

    class Liar(list[int]):
        def __len__(self) -> int:
            return 5

    with refused(ech.EchelonError):
        list(Feed(Liar([1, 2])))


def test_bytes_of_text_and_files_that_are_held_out(tmp_path: Any) -> None:
    for missing in (tmp_path / "absent", tmp_path):
        with refused(DatasetError):
            split_files(missing)
    (tmp_path / "a.txt").write_bytes(bytes(range(10)))
    text = ByteText([tmp_path / "a.txt"], context=4)
    assert len(text) == 2 and [part.tolist() for part in text[1]] == [[4, 5, 6, 7], [5, 6, 7, 8]]
    with refused(DatasetError):
        ByteText([tmp_path / "a.txt"], context=11)
    for i in range(40):
        (tmp_path / f"{i}.py").write_text("x = 1\n")
    train, held_out = split_files(tmp_path, held_out=0.1)
    assert len(held_out) == 4 and not set(train) & set(held_out) and len(train) == 36
    assert split_files(tmp_path, held_out=0.1) == (train, held_out)


def _undivided_evaluation() -> tuple[int, str]:
    from tests.kit.models import batch
    from tests.kit.units import Regression

    unit = Regression(layout="ddp")
    rows = list(zip(*batch(12, 0), strict=True))
    with pytest.raises(ech.EchelonError) as caught:
        ech.fit(unit, ech.Loader(rows, 4), ech.Loader(rows, 3), max_epochs=1)
    return unit.train_progress.num_steps_completed, str(caught.value)


def test_an_evaluation_loader_that_ranks_cannot_divide_is_refused_before_training(ranks: Ranks) -> None:
    for steps, text in ranks(2, _undivided_evaluation):
        assert steps == 0 and "cannot be divided by 2 ranks" in text
