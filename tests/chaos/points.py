"""Every call of the file system that a save makes, met by every accident: the jobs, and what came of them."""

from __future__ import annotations

import errno
import random
from collections import Counter
from typing import Any

from tests.chaos.forks import FAIL, FAIL_ON, KILL, TEAR, Forks

GOOD = {"old", "new", "saved", "told", "both"}
# A full disk stays full; a bad sector is met once.
USUAL = ((FAIL_ON, errno.ENOSPC), (FAIL, errno.EIO))
ALL = (*USUAL, (FAIL, errno.ENOSPC), (FAIL_ON, errno.EIO))


def jobs(ready: dict[str, Any], scenario: str, ranks: int, refusals: Any = USUAL) -> list[tuple[Any, ...]]:
    """(what, scenario, ranks, victim, number of the call, action, errno), for `tests.chaos.program:point`."""
    made: list[tuple[Any, ...]] = []
    for victim in range(ranks):
        for number, kind in enumerate(ready["calls"]["kill"][victim], 1):
            made += [(KILL, 0, victim, number)] + ([(TEAR, 0, victim, number)] if kind == "w" else [])
        for number, _ in enumerate(ready["calls"]["fail"][victim], 1):
            made += [(action, error, victim, number) for action, error in refusals]
    return [(ready, scenario, ranks, victim, number, action, error) for action, error, victim, number in made]


def meet(forks: Forks, chosen: list[tuple[Any, ...]], timeout_s: float = 600.0) -> Counter[str]:
    """How many points came out how; all must be good, and nobody may hang."""
    outcomes = forks("tests.chaos.program:point", chosen, timeout_s)
    bad = [f"{job[1:]}: {outcome}" for job, outcome in zip(chosen, outcomes, strict=True) if outcome not in GOOD]
    assert not bad, (
        f"{len(bad)} of {len(chosen)} crash points came out badly (scenario, ranks, victim, call, action, errno):\n"
        + ("\n".join(bad[:10]))
    )
    return Counter(outcomes)


def sample(chosen: list[tuple[Any, ...]], count: int, seed: int) -> list[tuple[Any, ...]]:
    return random.Random(seed).sample(chosen, count)
