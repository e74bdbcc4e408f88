"""The keyed permutation: position in the epoch -> sample, as a pure function, for any length up to 2**62."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echelon.common.errors import LoaderError
from echelon.data.order import Order
from tests.kit.refusals import refused

HUGE = st.one_of(st.integers(1, 2**62), st.integers(0, 62).map(lambda bits: 2**bits), st.integers(1, 2**31).map(lambda n: n * n))


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 100))
@example(length=1, seed=3, epoch=1)
@example(length=2, seed=3, epoch=1)
def test_the_order_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    assert sorted(Order(length, seed).indices(epoch, 0, length).tolist()) == list(range(length))


@given(length=st.integers(1, 2**62), seed=st.integers(0, 2**40), data=st.data())
def test_any_part_of_a_huge_order_is_the_same_alone_and_in_company(length: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start, min(length, start + 50)))
    order = Order(length, seed)
    together = order.indices(3, start, stop)
    assert ((together >= 0) & (together < length)).all()
    assert len(set(together.tolist())) == stop - start
    assert [order.indices(3, p, p + 1).item() for p in range(start, stop)] == together.tolist()


def test_orders_of_other_seeds_and_epochs_have_little_in_common() -> None:
    base = Order(10_000, 1).indices(0, 0, 10_000)
    for other in (Order(10_000, 2).indices(0, 0, 10_000), Order(10_000, 1).indices(1, 0, 10_000)):
        assert np.mean(base == other) < 0.002  # one in ten thousand is chance


@given(length=HUGE, seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40), data=st.data())
def test_points_of_a_huge_order_do_not_collide(length: int, seed: int, epoch: int, data: st.DataObject) -> None:
    points = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=200, unique=True))
    order, positions = Order(length, seed), np.array(points, dtype=np.int64)
    samples = order.at(epoch, positions)
    assert ((samples >= 0) & (samples < length)).all() and len(set(samples.tolist())) == len(points)


def test_the_largest_length_uses_all_its_places_in_blocks_that_make_no_difference() -> None:
    """2**62 fills the table of 2**31 by 2**31 exactly; sums of two halves still fit into 32 bits."""
    order = Order(2**62, 1)
    samples = order.at(0, np.array([0, 1, 2**31 - 1, 2**31, 2**62 - 1]))
    assert len(set(samples.tolist())) == 5 and ((samples >= 0) & (samples < 2**62)).all()
    many = order.indices(0, 2**62 - 20_000, 2**62)
    assert many.max() > 2**61 and np.median(many) == pytest.approx(2**61, rel=0.1)
    assert (many[8190:8200] == order.indices(0, 2**62 - 20_000 + 8190, 2**62 - 20_000 + 8200)).all()


def test_the_order_is_the_same_in_every_version() -> None:
    """A saved position means nothing in another order; whoever changes the formula must change `order.FORMULA`."""
    assert Order(10, 1).indices(0, 0, 10).tolist() == [1, 0, 5, 4, 9, 2, 3, 6, 7, 8]
    assert Order(10**10, 2**40).indices(7, 123456789, 123456792).tolist() == [9445327563, 7642716990, 2628302116]
    assert Order(10, 1, shuffle=False).indices(3, 2, 5).tolist() == [2, 3, 4]


def test_all_orders_of_a_few_samples_come_equally_often() -> None:
    """Chi-squared over the 24 orders of four samples; 99.9% of fair shuffles stay below 50."""
    counts = Counter(tuple(Order(4, seed).indices(epoch, 0, 4).tolist()) for seed in range(60) for epoch in range(40))
    assert sum((counts[order] - 100) ** 2 / 100 for order in permutations(range(4))) < 50


def test_what_follows_what_is_random() -> None:
    """Steps between neighbours over many epochs; the mean of chi-squared over its 99 degrees of freedom is 1."""
    steps = np.zeros(100)
    for epoch in range(500):
        order = Order(100, 3).indices(epoch, 0, 100)
        steps += np.bincount((order[1:] - order[:-1]) % 100, minlength=100)
    assert steps[0] == 0 and ((steps[1:] - 500) ** 2 / 500).sum() / 99 < 1.6


@pytest.mark.parametrize("length", [0, -1, 2**62 + 1])
def test_a_length_that_cannot_be_is_refused_and_so_are_positions_outside(length: int) -> None:
    with refused(LoaderError):
        Order(length)
    with refused(LoaderError):
        Order(10).indices(0, 5, 11)
