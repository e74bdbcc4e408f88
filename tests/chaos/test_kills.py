"""kill -9 at any moment, of a rank, of all, of the launcher: the run ends as if nothing had been."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import pytest

from tests.chaos import runs
from tests.chaos.runs import every_sample_once, history, until_done, values
from tests.chaos.survival import survive
from tests.kit.models import largest_difference


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "kills"),
    [("ddp", 6), ("fsdp", 2)],
)
def test_kills_change_no_bit_and_no_sample(crashfs: Path, tmp_path: Path, layout: str, kills: int) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    print(survive(tmp_path, crashfs, kills, seed, "step,moment,save,save,everyone,everyone's save", 240, layout))


@pytest.mark.full
def test_launchers_killed_and_another_number_of_ranks_each_time(tmp_path: Path) -> None:
    """4, 2, 3 and 4 ranks: each launcher but the last is killed in mid-epoch."""
    options = ("--steps", "32", "--ways", "launcher")
    straight, changing = tmp_path / "straight", tmp_path / "changing"
    straight.mkdir()
    changing.mkdir()
    until_done(straight, 2, 0, *options)
    for attempt, ranks in enumerate((4, 2, 3, 4)):
        process = runs.start(changing, ranks, runs.SCRIPT, str(changing), "--kills", "3", "--seed", "4", *options)
        code, output = runs.finish(process, 120)
        assert code == (0 if attempt == 3 else -signal.SIGKILL), output[-4000:]
    want, found = history(straight), history(changing, same_ranks=False)
    assert {k: sorted(v) for k, v in found.steps.items()} == {k: sorted(v) for k, v in want.steps.items()}
    assert every_sample_once(found.steps) == 5
    a, b = (values(folder, 1)[0]["module"] for folder in (straight, changing))
    assert 0 < largest_difference(a, b) < 1e-9


@pytest.mark.full
def test_a_stopped_rank_ends_the_attempt_within_the_timeout_and_the_next_goes_on(tmp_path: Path) -> None:
    """What the ranks' own group says after five seconds, not after half an hour; then the restart, to the end."""
    options = ("--steps", "16", "--stop-rank-1-at", "9", "--timeout", "5")
    process = runs.start(tmp_path, 2, runs.SCRIPT, str(tmp_path), *options, restarts=1, grace_s=0.5)
    code, output = runs.finish(process, 120)
    assert code == 0, output[-4000:]
    for said in ("rank 1 stopped .*in update \\d+", "imeout|imed out", "in train\n"):
        assert re.search(said, output), f"not {said!r} in:\n{output}"
    assert every_sample_once(history(tmp_path).steps) == 2
