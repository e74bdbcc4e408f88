"""Weighted draws and mixtures: which sample comes at which position is a pure function, and ratios hold at every prefix."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import echelon as ech
from echelon.common.errors import DatasetError, LoaderError
from echelon.data.loader import Padding
from tests.kit.refusals import refused


class Named:
    """Sample i of the dataset "a" is 1000 i + 1, of "b" + 2, and so on."""

    def __init__(self, name: str, length: int) -> None:
        self.mark, self.length = ord(name) - ord("a") + 1, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.length
        return 1000 * index + self.mark


def _drawn(dataset: Any, *, epochs: int = 1, seed: int = 0, **options: Any) -> list[int]:
    """What one rank alone is given, epoch after epoch."""
    loader = ech.Loader(dataset, 4, seed=seed, options=ech.data.LoaderOptions(dp=(0, 1)), **options)
    seen = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        seen += [value for batch in loader for value in batch.tolist()]
    return seen


@pytest.mark.full
@given(
    shares=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 40), min_size=6, max_size=6),
    epoch_length=st.integers(1, 90),
)
def test_ratios_hold_to_within_one_sample_at_every_prefix(shares: list[int], lengths: list[int], epoch_length: int) -> None:
    """And each position is a sample by itself, whatever is asked for beside it."""
    names = "abcdef"[: len(shares)]
    mixture = ech.Mixture(
        {n: Named(n, length) for n, length in zip(names, lengths, strict=False)},
        dict(zip(names, shares, strict=True)),
        samples_per_epoch=epoch_length,
    )
    order = mixture.order(3, shuffle=True)
    epochs = -(-2 * sum(shares) // epoch_length)
    samples = np.concatenate([order.at(e, np.arange(epoch_length)) for e in range(epochs)])
    assert [order.at(0, np.array([p])).item() for p in range(epoch_length)] == samples[:epoch_length].tolist()
    owners = np.array([names.index(mixture.locate(s)[0]) for s in samples.tolist()])
    prefix = np.arange(1, len(owners) + 1)
    for which, share in enumerate(shares):
        gone = np.cumsum(owners == which) - prefix * share / sum(shares)
        assert np.abs(gone).max() < 1


def test_each_dataset_has_epochs_of_its_own() -> None:
    """Of ten positions three are a's: its five samples are used up in mid-epoch, and begin again in another order."""
    seen = _drawn(ech.Mixture({"a": Named("a", 5), "b": Named("b", 70)}, {"a": 0.3, "b": 0.7}, samples_per_epoch=100), epochs=2)
    a, b = [v // 1000 for v in seen if v % 1000 == 1], [v // 1000 for v in seen if v % 1000 == 2]
    assert len(a) == 60 and len(b) == 140
    rounds = [tuple(a[i : i + 5]) for i in range(0, 60, 5)]
    assert all(sorted(r) == list(range(5)) for r in rounds) and len(set(rounds)) > 6
    assert sorted(b[:70]) == sorted(b[70:]) == list(range(70)) and b[:70] != b[70:]


@pytest.mark.parametrize("kind", ["mixture", "weighted"])
def test_global_batches_do_not_depend_on_ranks_accumulation_workers_or_a_restart(kind: str) -> None:
    if kind == "mixture":
        data: Any = ech.Mixture({"a": Named("a", 9), "b": Named("b", 40)}, {"a": 1, "b": 2})
    else:
        data = ech.data.Weighted(Named("a", 49), np.arange(49) % 3)

    def batches(ranks: int, accumulation: int, resumed_at: int = 0, workers: int = 0) -> list[list[int]]:
        per_rank = []
        for rank in range(ranks):
            loader = ech.Loader(
                data, 12, seed=5, accumulate=accumulation, options=ech.data.LoaderOptions(dp=(rank, ranks)), num_workers=workers
            )
            loader.set_epoch(1)
            if resumed_at:
                loader.load_state_dict({**loader.state_dict(), "position": resumed_at * accumulation})
            per_rank.append([[] if isinstance(b, Padding) else b.tolist() for b in loader])
        micro = [sum((r[m] for r in per_rank), []) for m in range(len(per_rank[0]))]
        return [sorted(sum(micro[k : k + accumulation], [])) for k in range(0, len(micro), accumulation)]

    want = batches(1, 1)
    assert sum(map(len, want)) == 49
    assert batches(2, 1) == batches(3, 2) == batches(4, 3) == batches(1, 1, workers=2) == want
    assert batches(2, 3, resumed_at=2) == want[2:]


def test_names_come_beside_the_samples_which_are_asked_for_at_once_and_have_orders_of_their_own() -> None:
    class AtOnce(Named):
        calls = 0

        def __getitems__(self, indices: list[int]) -> list[int]:
            AtOnce.calls += 1
            return [self[i] for i in indices]

    mixture = ech.Mixture({"a": AtOnce("a", 50), "b": Named("b", 50)}, {"a": 1, "b": 1}, named=True)
    seen: dict[str, list[int]] = {"a": [], "b": []}
    for names, values in ech.Loader(mixture, 4, options=ech.data.LoaderOptions(dp=(0, 1))):
        for name, value in zip(names, values.tolist(), strict=True):
            assert ord(name) - ord("a") + 1 == value % 1000
            seen[name].append(value // 1000)
    assert seen["a"] != seen["b"] and AtOnce.calls == 25
    assert mixture[53] == ("b", 3002) and mixture.locate(53) == ("b", 3)


def test_ratios_mean_what_they_say() -> None:
    def ratios(*given: Any) -> list[Fraction]:
        names = "abc"[: len(given)]
        return list(ech.Mixture({n: Named(n, 3) for n in names}, dict(zip(names, given, strict=True))).ratios.values())

    assert ratios(0.3, 0.7) == [Fraction(3, 10), Fraction(7, 10)]
    assert ratios(1 / 3, 2 / 3) == ratios("1/3", "2/3") == ratios(1, 2) == [Fraction(1, 3), Fraction(2, 3)]
    assert ratios(0.1234567891, 0.5, 0.25) == pytest.approx(
        [0.1234567891 / 0.8734567891, 0.5 / 0.8734567891, 0.25 / 0.8734567891], 1e-4
    )


@pytest.mark.parametrize("ratios", [{"a": 1}, {"a": 1, "b": 0}, {"a": 1, "b": float("nan")}, {"a": 1, "b": 3.3e-7}, "empty"])
def test_ratios_that_cannot_be_are_refused(ratios: Any) -> None:
    data = {"a": Named("a", 3), "b": Named("b", 0 if ratios == "empty" else 3)}
    with refused(DatasetError):
        ech.Mixture(data, {"a": 1, "b": 1} if ratios == "empty" else ratios)


def test_draws_follow_the_weights() -> None:
    """Chi-squared with 3 degrees of freedom; 99.9% of fair draws stay below 16.3. What weighs nothing never comes."""
    weights = [0.0, 1.0, 2.0, 0.0, 3.0, 4.0, 0.0]
    counts = Counter(v // 1000 for v in _drawn(ech.data.Weighted(Named("a", 7), weights, samples_per_epoch=20_000)))
    assert not {0, 3, 6} & counts.keys()
    assert sum((counts[i] - 2000 * w) ** 2 / (2000 * w) for i, w in enumerate(weights) if w) < 16.3


@pytest.mark.parametrize(("word", "sample"), [(0, 1), (2**64 - 1, 3)])
def test_the_ends_of_the_range_meet_no_sample_without_weight(monkeypatch: pytest.MonkeyPatch, word: int, sample: int) -> None:
    order = ech.data.Weighted(range(5), [0, 1, 0, 3, 0]).order(0)
    monkeypatch.setattr("echelon.data.views.mix64", lambda x: np.full_like(x, word))
    assert order.at(0, np.arange(2)).tolist() == [sample] * 2


def test_draws_of_other_epochs_and_seeds_differ() -> None:
    data = ech.data.Weighted(Named("a", 1000), np.ones(1000))
    order = data.order(1)
    base = order.at(0, np.arange(1000))
    assert np.mean(base == order.at(1, np.arange(1000))) < 0.01
    assert np.mean(base == data.order(2).at(0, np.arange(1000))) < 0.01
    assert (data.order(1).at(0, np.arange(500, 510)) == base[500:510]).all()
    assert 600 < len(set(base.tolist())) < 660  # with replacement: 1 - 1/e of all


@pytest.mark.parametrize("weights", [[1.0, -1.0], [0.0, 0.0], [1.0, float("nan")], [1.0]])
def test_weights_that_cannot_be_are_refused(weights: list[float]) -> None:
    with refused(DatasetError):
        ech.data.Weighted(range(2), weights)


def test_a_changed_ratio_is_noticed_on_resume() -> None:
    def loader(ratio: int) -> ech.Loader:
        return ech.Loader(ech.Mixture({"a": Named("a", 9), "b": Named("b", 9)}, {"a": 1, "b": ratio}), 4)

    with refused(LoaderError):
        loader(3).load_state_dict(loader(2).state_dict())
