"""The long version: `python -m tests.chaos.soak`. Every crash point of two ranks, 200 kills, 1,000 damages, 200 restarts.

Prints what it counted; ends with exit code 1 at the first failure, which names the seed that repeats it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

from tests.chaos import points
from tests.chaos.conftest import build
from tests.chaos.forks import Forks
from tests.chaos.program import SCENARIOS, scratch
from tests.chaos.survival import join, survive

ROUND = 50  # kills of one run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--ranks", default="1,2", help="of the crash points")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as home:
        folder = Path(home)
        library = build(folder)
        with Forks(library) as forks:
            damage(forks, given.damages, given.seed)
            for scenario in filter(None, given.scenarios.split(",")):
                for ranks in map(int, given.ranks.split(",")):
                    crash_points(forks, scenario, ranks)
        restarts(folder, given.restarts, given.seed)
        kills(folder, library, given.kills, given.seed)


def damage(forks: Forks, count: int, seed: int) -> None:
    found = Counter[str]()
    with tempfile.TemporaryDirectory(dir=scratch()) as home:
        (made,) = forks("tests.chaos.damage:make", [(home,)])
        for each in forks("tests.chaos.damage:trials", [(made, seed + n, 50) for n in range(-(-count // 50))], 3600):
            found += Counter(each)
    print(f"damages: {found.total()} of {found.total()} found and named: {dict(found)}", flush=True)


def crash_points(forks: Forks, scenario: str, ranks: int) -> None:
    with tempfile.TemporaryDirectory(dir=scratch()) as home:
        (ready,) = forks("tests.chaos.program:prepare", [(scenario, ranks, home)])
        outcomes = points.meet(forks, points.jobs(ready, scenario, ranks, points.ALL), 7200)
    total = outcomes.total()
    print(f"crash points, {scenario}, {ranks} ranks: {total} of {total} good: {dict(outcomes)}", flush=True)


def restarts(folder: Path, count: int, seed: int) -> None:
    here = folder / "joins"
    here.mkdir()
    first, took = join(here, count // 2, 2, seed, 60 + 3 * count) if count else ([], [])
    if took:
        print(
            f"restarts: {len(first + took)} of {count} joined; median {median(took):.2f} s, longest {max(took):.2f} s", flush=True
        )


def kills(folder: Path, library: Path, count: int, seed: int) -> None:
    began, done = time.monotonic(), Counter[str]()
    for number in range(-(-count // ROUND)):
        here = folder / f"kills-{number}"
        here.mkdir()
        ways = "step,moment,save,save,everyone,everyone's save,launcher"
        done.update(
            survive(here, library, min(ROUND, count - number * ROUND), seed + number, ways, 1200, ("ddp", "fsdp")[number % 2])
        )
    if count:
        print(f"kills: {done['kills']} survived, bit-equal, {done['epochs']} epochs with every sample once", flush=True)
        print(
            f"  {done['launchers']} launchers, {done['redone']} rank-steps redone, {time.monotonic() - began:.0f} s", flush=True
        )


if __name__ == "__main__":
    main()
