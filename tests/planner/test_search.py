"""Which layout is fastest of those that fit, and what a whole training costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from echelon.common.errors import PlanError
from echelon.planner.bill import Goal, bill_of
from echelon.planner.memory import Answer, Setting, lines
from echelon.planner.search import Trace, candidates, found_best, options_of
from tests.kit.refusals import refused

GIB = 2**30
# A script's own, which shards over two of four ranks: 4 GiB of parameters, and twice that for the optimizer.
OWN = Answer(
    "dp_replicate=2,dp_shard=2",
    True,
    peak=40 * GIB,
    by_kind={"parameters": 2 * GIB, "optimizer": 4 * GIB},
    samples=64,
    micro_batches=1,
    seconds=9.0,
    parameter_bytes=4 * GIB,
    verdict="does not fit",
)


def _answer(layout: str, peak: int, fits: bool, **more: Any) -> Answer:
    return Answer(layout, False, peak=peak, samples=64, verdict="fits" if fits else "does not fit", **more)


def _each(trace: Callable[[str, int, bool], Answer]) -> Trace:
    return lambda tries: [trace(*each) for each in tries]


def test_layouts_are_products_of_axes_that_the_nodes_allow() -> None:
    assert [each.layout for each in candidates(4, 8)] == ["ddp", "zero1", "fsdp", "dp_shard=2,tp=2"]
    two_nodes = {each.layout: each for each in candidates(16, 8)}
    assert set(two_nodes) == {
        "ddp",
        "zero1",
        "fsdp",
        "dp_replicate=2,dp_shard=8",
        "dp_shard=8,tp=2",
        "dp_replicate=2,dp_shard=4,tp=2",
        "dp_shard=4,tp=4",
        "dp_replicate=2,dp_shard=2,tp=4",
        "dp_shard=2,tp=8",
        "pp=2,dp_shard=8",
        "pp=2,tp=8",
    }
    assert (two_nodes["dp_shard=4,tp=4"].parameters, two_nodes["dp_shard=4,tp=4"].ways) == (16, 4)
    assert candidates(1, 8) == []
    with_experts = {each.layout: each for each in candidates(16, 8, 24) if each not in two_nodes.values()}
    assert set(with_experts) == {"ep=2", "ep=4", "ep=8", "dp_replicate=2,dp_shard=8,ep=8", "pp=2,dp_shard=8,ep=8"}
    assert [(each.parameters, each.ways) for each in with_experts.values()] == [(16, 8), (16, 16), (16, 16), (16, 16), (8, 16)]


def test_what_cannot_fit_is_not_traced_and_the_rest_has_few_micro_batches() -> None:
    """Activations of 32 GiB on a rank with a micro-batch an update; 12 GiB beside them, less what a layout splits."""
    asked = []

    def trace(layout: str, many: int, recompute: bool) -> Answer:
        if recompute:
            return Answer(layout, False, why="no blocks")
        asked.append((layout, many))
        activations = 32 * GIB // many
        peak, kinds = activations + GIB, {"activations": activations}
        return _answer(layout, peak, peak <= 10 * GIB, by_kind=kinds, micro_batches=many, seconds=many)

    fit, out = found_best(OWN, Setting(4, 8, 10 * GIB), _each(trace))
    assert [each.layout for each in out] == ["ddp", OWN.layout] and "12.0 GiB" in out[0].why
    assert asked == [(layout, many) for many in (1, 4) for layout in ("zero1", "fsdp", "dp_shard=2,tp=2")]
    assert [each.micro_batches for each in fit] == [4, 4, 4]


def test_the_fastest_comes_first_and_refusals_are_kept() -> None:
    seconds = {"ddp": 3.0, "zero1": 1.0, "fsdp": 2.0}

    def trace(layout: str, many: int, recompute: bool) -> Answer:
        if layout not in seconds:
            return Answer(layout, False, why="heads are not divided")
        return _answer(layout, GIB, True, seconds=seconds[layout], micro_batches=many)

    own = replace(OWN, verdict="fits")
    fit, out = found_best(own, Setting(4, 8, 80 * GIB), _each(trace))
    assert [each.layout for each in fit] == ["zero1", "fsdp", "ddp", own.layout]
    assert [each.why for each in out] == ["heads are not divided"]


def test_a_micro_batch_of_one_sample_is_the_last_resort() -> None:
    def trace(layout: str, many: int, recompute: bool) -> Answer:
        return _answer(layout, 90 * GIB, False, by_kind={"activations": 30 * GIB}, micro_batches=many)

    fit, out = found_best(OWN, Setting(4, 8, 80 * GIB), _each(trace))
    assert not fit and [each.micro_batches for each in out if not each.is_own] == [16, 16, 16, 32]


def test_blocks_are_recomputed_where_that_is_faster_or_all_that_fits() -> None:
    """Eight micro-batches or recomputation fit fsdp, of which the latter is faster; zero1 is faster without; tp only with."""
    seconds = {("zero1", 8, False): 2.0, ("zero1", 1, True): 3.0, ("fsdp", 8, False): 3.0, ("fsdp", 1, True): 1.0}
    seconds |= {("dp_shard=2,tp=2", 1, True): 4.0}

    def trace(layout: str, many: int, recompute: bool) -> Answer:
        fits, kinds = (layout, many, recompute) in seconds, {"activations": 72 * GIB // many}
        took = seconds.get((layout, many, recompute), 9.0)
        return _answer(
            layout, (9 if fits else 90) * GIB, fits, by_kind=kinds, micro_batches=many, seconds=took, recompute=recompute
        )

    fit, _ = found_best(OWN, Setting(4, 8, 28 * GIB), _each(trace))
    assert [(each.layout, each.micro_batches, options_of(each)) for each in fit] == [
        ("fsdp", 1, "recompute='blocks'"),
        ("zero1", 8, "accumulate=8"),
        ("dp_shard=2,tp=2", 1, "recompute='blocks'"),
    ]


@pytest.mark.parametrize(
    ("kinds", "budget", "says"),
    [
        ({"parameters": 4, "activations": 60}, 32, "about accumulate=4 in place of 1, or recompute='blocks'"),
        ({"parameters": 4, "activations": 6000}, 32, "one sample's activations are too large"),
        ({"parameters": 20, "optimizer": 40, "activations": 2}, 32, "about 10 ranks"),
        ({"parameters": 60, "activations": 50}, 32, "more ranks, and give recompute='blocks'"),
        ({"parameters": 60}, 1, "a device with more memory"),
    ],
)
def test_where_nothing_fits_what_would_is_said(kinds: dict[str, int], budget: int, says: str) -> None:
    """GiB, on four ranks with 16 samples each."""
    sizes = {kind: many * GIB for kind, many in kinds.items()}
    answer = replace(OWN, by_kind=sizes, peak=sum(sizes.values()), verdict="does not fit")
    told = next(line for line in lines([answer], 4, "h100-sxm", budget * GIB) if line.startswith("None is sure to fit"))
    assert says in told and ("too much to be sure" in told or budget == 1)


def test_a_bill_is_arithmetic() -> None:
    bill = bill_of(Goal.of("300B tokens"), 3e6, 2.0, 256, price=2.0)
    assert (bill.updates, bill.seconds) == (100_000, 200_000.0)
    assert bill.days == pytest.approx(200_000 / 86_400) and bill.cost == pytest.approx(2 * 256 * 200_000 / 3600)
    assert (bill.failures, bill.save_every, bill.lost) == (0.0, 0.0, 0.0)


def test_saves_are_as_frequent_as_young_and_daly_say() -> None:
    bill = bill_of(Goal.of("1000 updates"), 1, 3600.0, 100, mtbf=10_000, save=50.0)
    between = 10_000 * 3600 / 100
    assert bill.save_every == pytest.approx(math.sqrt(2 * 50 * between))
    lost = {
        every: 50 / every + (every / 2 + 50) / between
        for every in (0.9 * bill.save_every, bill.save_every, 1.1 * bill.save_every)
    }
    assert bill.lost == min(lost.values()) == pytest.approx(lost[bill.save_every])
    assert bill.failures == pytest.approx(bill.days * 24 / 100) and bill.device_hours == pytest.approx(bill.days * 24 * 100)


def test_goals_and_failures_that_make_no_sense_are_refused() -> None:
    assert [Goal.of(text).amount for text in ("300B tokens", "2.5m samples", "10 updates")] == [3e11, 2.5e6, 10.0]
    for text in ("300B", "tokens", "-1 tokens", "0 tokens", "1e9 tokens"):
        with refused(PlanError):
            Goal.of(text)
    with refused(PlanError):
        bill_of(Goal(1.0, "updates"), 1, 1.0, 100_000, mtbf=1.0)
