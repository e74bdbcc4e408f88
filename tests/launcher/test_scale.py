"""What a step of the library costs a rank grows no faster than the ranks: instructions, bytes and memory, without a clock."""

from __future__ import annotations

import pytest
from bench._steps import STEPS, Step
from bench.scale import operations

FEW, MANY = 16, 128


@pytest.mark.full
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_no_step_grows_faster_than_the_ranks(step: Step) -> None:
    few, many = operations(step, FEW), operations(step, MANY)
    for what, before, after in zip(("instructions", "bytes", "memory"), few, many, strict=True):
        # A tenth more for what is sorted. Dictionaries double.
        allowed = 1.1 * before * MANY / FEW if what != "memory" else 1.6 * before * MANY / FEW + 65_536
        assert after <= allowed, f"{step.name}: {before} {what} of a rank of {FEW} became {after} of {MANY}"


@pytest.mark.parametrize("step", [step for step in STEPS if step.constant], ids=lambda step: step.name)
def test_what_only_asks_whether_all_agree_sends_the_same_on_any_number_of_ranks(step: Step) -> None:
    few, many = operations(step, FEW)[1], operations(step, MANY)[1]
    assert abs(few - many) <= 0.02 * few and many < 1000  # compressed numbers differ by a byte
