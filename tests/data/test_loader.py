"""Rules of truth 1 and 2 in the loader: the samples of a global batch depend on nothing but (seed, epoch, k)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import echelon as ech
from echelon.common.errors import DatasetError, LoaderError, UsageError
from echelon.data.loader import Padding, share
from echelon.data.prefetch import Feed
from echelon.data.text import ByteText, split_files
from tests.conftest import Ranks
from tests.kit.refusals import refused


class Numbers(torch.utils.data.Dataset[int]):
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


def _global_batches(length: int, size: int, ranks: int, accumulation: int, epoch: int = 0, **options: Any) -> list[list[int]]:
    """The global batches as sets of samples, put together from what every rank sees."""
    per_rank = []
    for rank in range(ranks):
        loader = ech.Loader(
            Numbers(length), size, accumulate=accumulation, options=ech.data.LoaderOptions(dp=(rank, ranks)), **options
        )
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


def test_dropping_the_tail_drops_only_the_tail() -> None:
    assert len(_global_batches(50, 24, 2, 1, tail="drop")) == 2
    assert len(_global_batches(50, 24, 2, 1, tail="keep")) == 3


def test_a_rank_without_a_sample_gets_padding_and_equal_length() -> None:
    loaders = [ech.Loader(Numbers(9), 8, options=ech.data.LoaderOptions(dp=(r, 4))) for r in range(4)]
    batches = [list(loader) for loader in loaders]
    assert [len(b) for b in batches] == [2] * 4
    assert [isinstance(b[-1], Padding) for b in batches] == [False, True, True, True]
    assert all(loader.pads for loader in loaders)


def test_workers_load_the_same_batches() -> None:
    alone = ech.Loader(Numbers(40), 8, seed=3)
    workers = ech.Loader(Numbers(40), 8, seed=3, num_workers=2)
    assert _batches(alone) == _batches(workers)


def test_loading_draws_nothing_from_the_global_random_stream() -> None:
    before = torch.get_rng_state()
    list(ech.Loader(Numbers(40), 8))
    assert torch.equal(before, torch.get_rng_state())


@given(at=st.integers(0, 10), epoch=st.integers(0, 3))
def test_a_restored_loader_goes_on_where_the_saved_one_stood(at: int, epoch: int) -> None:
    loader = ech.Loader(Numbers(83), 8, options=ech.data.LoaderOptions(dp=(0, 1)))
    loader.set_epoch(epoch)
    want = _batches(loader)
    loader.set_epoch(epoch + 1)
    loader.set_epoch(epoch)
    iterator = iter(loader)
    for _ in range(at):
        next(iterator)
    fresh = ech.Loader(Numbers(83), 8, options=ech.data.LoaderOptions(dp=(0, 1)))
    fresh.load_state_dict(loader.state_dict())
    fresh.set_epoch(epoch)  # as the loop does
    assert _batches(fresh) == want[at:]


def test_a_loader_resumes_under_other_ranks_and_accumulation() -> None:
    whole = _global_batches(96, 24, 1, 1)
    loader = ech.Loader(Numbers(96), 24, accumulate=2, options=ech.data.LoaderOptions(dp=(0, 2)))
    iterator = iter(loader)
    for _ in range(4):  # two global batches
        next(iterator)
    rest = []
    for rank in range(3):
        other = ech.Loader(Numbers(96), 24, accumulate=4, options=ech.data.LoaderOptions(dp=(rank, 3)))
        other.load_state_dict(loader.state_dict())
        rest.append(_batches(other))
    seen = sorted(sum((sum(r, []) for r in rest), []))
    assert seen == sorted(sum(whole[2:], []))


def test_a_global_batch_that_ranks_cannot_divide_names_those_that_can() -> None:
    loader = ech.Loader(Numbers(100), 12, accumulate=2, options=ech.data.LoaderOptions(dp=(0, 4)))
    with pytest.raises(UsageError) as error:
        len(loader.dp)
    text = str(error.value)
    assert "global_batch 12 cannot be divided by 4 ranks x accumulate=2, which is 8" in text
    assert "Numbers of ranks that can, with accumulate=2: 1, 2, 3, 6." in text
    assert "With 4 ranks accumulate=1 or 3 can." in text
    assert "8 or 16" in text


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_evaluation_sees_each_sample_once_at_any_number_of_ranks(ranks: int) -> None:
    for length in (1, 5, 24, 37, 50):
        assert sorted(sum(_global_batches(length, 12, ranks, 1, shuffle=False), [])) == list(range(length))


def test_a_dataset_smaller_than_a_global_batch_is_refused() -> None:
    with refused(LoaderError):
        ech.Loader(Numbers(7), 8)
    assert _batches(ech.Loader(Numbers(7), 8, shuffle=False)) == [[0, 1, 2, 3, 4, 5, 6]]  # an evaluation set may be small


def test_an_iterable_dataset_is_refused_by_name() -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with refused(LoaderError):
        ech.Loader(Endless(), 8)


def test_the_feed_knows_the_last_batch_with_and_without_a_length() -> None:
    for loader in ([1, 2, 3], iter([1, 2, 3])):
        feed = Feed(loader)
        assert [(step.batch, step.is_last) for step in feed] == [(1, False), (2, False), (3, True)]


def test_the_feed_stops_at_its_limit_without_reading_on() -> None:
    source = iter(range(10))
    feed = Feed(source, limit=3)
    assert [(step.batch, step.is_last) for step in feed] == [(0, False), (1, False), (2, True)]
    assert next(source) == 3


def test_the_feed_reports_the_position_of_what_was_used() -> None:
    loader = ech.Loader(Numbers(40), 8)
    feed = Feed(loader)
    next(feed)
    next(feed)
    state = feed.loader_state()
    assert state is not None and state["position"] == 2


def test_a_loader_with_a_wrong_length_is_named() -> None:
    class Liar(list[int]):
        def __len__(self) -> int:
            return 5

    with refused(ech.EchelonError):
        list(Feed(Liar([1, 2])))


def test_byte_windows_hold_each_byte_and_its_successor(tmp_path: Any) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(10)))
    text = ByteText([tmp_path / "a.txt"], context=4)
    assert len(text) == 2
    inputs, targets = text[1]
    assert inputs.tolist() == [4, 5, 6, 7] and targets.tolist() == [5, 6, 7, 8]


def test_files_are_split_the_same_way_whatever_else_is_there(tmp_path: Any) -> None:
    for i in range(40):
        (tmp_path / f"{i}.py").write_text("x = 1\n")
    train, held_out = split_files(tmp_path, held_out=0.1)
    assert len(held_out) == 4 and not set(train) & set(held_out) and len(train) == 36
    assert split_files(tmp_path, held_out=0.1) == (train, held_out)


def test_text_that_is_missing_or_too_little_is_named(tmp_path: Any) -> None:
    with refused(DatasetError):
        split_files(tmp_path / "absent")
    with refused(DatasetError):
        split_files(tmp_path)
    (tmp_path / "a.txt").write_text("ab")
    with refused(DatasetError):
        ByteText([tmp_path / "a.txt"], context=8)


def test_arguments_of_torchs_loader_are_answered_with_ours() -> None:
    with refused(LoaderError):
        ech.Loader(range(8), batch_size=4)  # type: ignore[call-arg, arg-type]
    with refused(LoaderError):
        ech.Loader(range(8), 4, gradient_accumulation_steps=2)  # type: ignore[call-arg, arg-type]
    with refused(LoaderError):
        ech.Loader(range(8), 4, drop_last=True)  # type: ignore[call-arg, arg-type]


class _Squares:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index**2


def test_whatever_has_samples_by_number_is_a_dataset_for_a_type_checker_too() -> None:
    loaders = [ech.Loader(torch.arange(8), 4), ech.Loader([*range(8)], 4), ech.Loader(range(8), 4), ech.Loader(_Squares(), 4)]
    assert [sum(len(each) for each in loader) for loader in loaders] == [8] * 4


def test_a_global_batch_may_be_a_whole_float() -> None:
    assert [len(each) for each in ech.Loader(range(8), 8 / 2)] == [4, 4]  # type: ignore[arg-type]
    with refused(LoaderError):
        ech.Loader(range(8), 2.5)  # type: ignore[arg-type]


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
