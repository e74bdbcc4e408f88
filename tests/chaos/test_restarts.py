"""A restart always joins; and two runs in one folder."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from tests.chaos.forks import Forks
from tests.chaos.survival import join


@pytest.mark.full
def test_sixteen_of_sixteen_restarts_join(tmp_path: Path) -> None:
    """Ranks start up to half a second apart; either is killed within 20 ms after they met."""
    seed = random.randrange(10**6)
    first, took = join(tmp_path, 8, 2, seed, 240)
    print(f"seed {seed}: {len(took)} joined, median {median(took):.2f} s, longest {max(took):.2f} s; the first ones {first}")
    assert len(first + took) == 16


def test_of_two_runs_in_one_folder_one_trains_and_the_other_is_told(forks: Forks, tmp_path: Path) -> None:
    """At the same moment, again and again: never both, never a mixture, and never nobody."""
    outcomes = Counter[str]()
    for told in forks("tests.chaos.program:race", [(seed,) for seed in range(6)]):
        assert sorted(each.partition(":")[0] for each in told) in (["refused", "trained"], ["ahead", "trained"]), told
        outcomes += Counter(each.partition(":")[0] for each in told)
    assert outcomes["trained"] == 6
    print(dict(outcomes))


def test_the_second_run_hears_at_once_whose_the_folder_is(forks: Forks) -> None:
    """Once the first has had its two seconds to be a run that is just dying."""
    (answer,) = forks("tests.chaos.program:second", [()])
    text, seconds, pid = answer
    assert f"is being written by another run: process {pid} of " in text and seconds < 60
