"""Whatever call of a save is the last one, or fails: the old or the new checkpoint, whole, and a run that goes on from it."""

from __future__ import annotations

import errno
import random
import re
from pathlib import Path

import pytest

from tests.chaos import points
from tests.chaos.forks import FAIL, Forks

# What a save cannot do without; a shim that sees less than these is broken, and so would be every test here.
CALLS = set("mowscrtukd")


@pytest.mark.parametrize("scenario", ["sync", "async"])
@pytest.mark.full
def test_every_call_of_a_save_may_be_the_last_or_fail(forks: Forks, tmp_path: Path, scenario: str) -> None:
    """One rank: litter of an older kill, a corrupt newer step, a save, the same step again, retention."""
    (ready,) = forks("tests.chaos.program:prepare", [(scenario, 1, tmp_path)])
    assert set(ready["calls"]["kill"][0]) >= CALLS and len(ready["calls"]["kill"][0]) > 45
    outcomes = points.meet(forks, points.jobs(ready, scenario, 1))
    assert all(outcomes[name] >= 10 for name in ("old", "new", "saved", "told")), outcomes
    print(f"{scenario}: {outcomes.total()} crash points, {dict(outcomes)}")


@pytest.mark.full
def test_a_power_cut_does_not_undo_a_new_folder(forks: Forks, tmp_path: Path) -> None:
    """Made and synced, and the one above it, too, before anything is put there."""
    (found,) = forks("tests.chaos.program:first_calls", [(tmp_path,)])
    assert re.match("m+sso", found), found


@pytest.mark.full
@pytest.mark.parametrize(
    ("scenario", "number"),
    [("sync", 5), ("async", 2)],
)
def test_of_two_ranks_either_may_be_met(forks: Forks, tmp_path: Path, scenario: str, number: int) -> None:
    """Some points of each rank; the soak takes all. What fails on one is told by both, in the same words."""
    (ready,) = forks("tests.chaos.program:prepare", [(scenario, 2, tmp_path)])
    every = points.jobs(ready, scenario, 2)
    seed = random.randrange(10**6)
    on_one = next(job for job in every if job[3:] == (1, 2, FAIL, errno.EIO))
    print(f"seed {seed}")
    outcomes = points.meet(forks, [on_one, *points.sample(every, number, seed)])
    assert outcomes["told"] >= 1, outcomes
