"""Programs whose options are drawn train under each layout what they train in one process in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Ranks
from tests.kit.random_programs import differences, interrupted, resumed

pytestmark = pytest.mark.standing_ranks


@pytest.mark.parametrize(("size", "seeds"), [(2, range(4)), pytest.param(4, range(4, 8), marks=pytest.mark.full)], ids=str)
def test_each_trains_as_in_one_process(ranks: Ranks, size: int, seeds: range) -> None:
    for found in ranks(size, differences, list(seeds)):
        assert not found, "\n".join(found)


@pytest.mark.full(but=("2-2",))
@pytest.mark.parametrize(("before", "after", "seeds"), [(2, 2, range(6)), (4, 2, range(14, 20)), (2, 4, range(20, 26))])
def test_each_goes_on_after_it_was_killed(ranks: Ranks, tmp_path: Path, before: int, after: int, seeds: range) -> None:
    """On three ranks or more, a model with a buffer was not resumed under ddp."""
    ranks(before, interrupted, list(seeds), str(tmp_path))
    for found in ranks(after, resumed, list(seeds), str(tmp_path)):
        assert not found, "\n".join(found)
