"""Programs whose options are drawn train under each layout what they train in one process in plain PyTorch."""

from __future__ import annotations

import pytest

from tests.conftest import Ranks
from tests.kit.random_programs import differences

pytestmark = pytest.mark.standing_ranks


@pytest.mark.parametrize(("size", "seeds"), [(2, range(4)), pytest.param(4, range(4, 12), marks=pytest.mark.full)], ids=str)
def test_each_trains_as_in_one_process(ranks: Ranks, size: int, seeds: range) -> None:
    for found in ranks(size, differences, list(seeds)):
        assert not found, "\n".join(found)
