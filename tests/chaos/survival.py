"""Runs that are killed or restarted again and again, as often as a test or the soak wants."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos import runs
from tests.chaos.runs import every_sample_once, history, until_done, values
from tests.kit.models import same_bits

OPTIONS = ("--accumulation", "2", "--dropout", "0.3")


JOINS = str(Path(__file__).with_name("joins.py"))


def join(folder: Path, restarts: int, jobs: int, seed: int, timeout_s: float) -> tuple[list[float], list[float]]:
    """Seconds from each kill to the next meeting of both ranks, in `jobs` runs side by side, `restarts` of each.

    Returns:
        those of each run's first restart, which may come while the server still loads what ranks need, and of all others.
    """
    processes = []
    for job in range(jobs):
        here = folder / str(job)
        here.mkdir()
        processes.append((here, runs.start(here, 2, JOINS, str(here), str(restarts), str(seed + job), restarts=restarts)))
    began, first, took = time.monotonic(), list[float](), list[float]()
    for here, process in processes:
        code, output = runs.finish(process, timeout_s - (time.monotonic() - began))
        assert code == 0, output[-3000:]
        lines = [line.split() for line in (here / "joins.log").read_text().splitlines()]
        assert Counter(int(attempt) for what, attempt, *_ in lines if what == "joined") == dict.fromkeys(range(restarts + 1), 2)
        killed = {int(attempt): float(at) for what, attempt, _, at in lines if what == "killed"}
        joined = {n: max(float(at) for what, a, _, at in lines if what == "joined" and int(a) == n) for n in range(restarts + 1)}
        first.append(joined[1] - killed[0])
        took += [joined[n + 1] - killed[n] for n in range(1, restarts)]
    return first, took


def survive(
    folder: Path, library: Path, kills: int, seed: int, ways: str, timeout_s: float, layout: str = "ddp"
) -> dict[str, Any]:
    """A run that is killed `kills` times, and the same run undisturbed: what was lost, and what it took."""
    steps = str(20 * kills + 40)
    undisturbed, killed = folder / "undisturbed", folder / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    options = ("--steps", steps, "--layout", layout, *OPTIONS)
    until_done(undisturbed, 2, 0, *options, timeout_s=timeout_s)
    survived = until_done(killed, 2, kills, *options, "--seed", str(seed), "--ways", ways, library=library, timeout_s=timeout_s)
    assert survived.attempts == kills + 1, f"{survived.attempts} attempts: not every one of {kills} kills happened"
    assert same_bits(values(killed, 2), values(undisturbed, 2)), "the run ended otherwise than it would have"
    want, found = history(undisturbed), history(killed)
    assert found.steps == want.steps, "other samples, or in another order"
    epochs = every_sample_once(found.steps, accumulation=2)
    left = [p.name for p in (killed / "checkpoints").iterdir() if not p.name.startswith("step-")]
    assert left == [], left
    return {"kills": kills, "launchers": survived.launchers, "epochs": epochs, "redone": found.redone, "s": survived.seconds}
