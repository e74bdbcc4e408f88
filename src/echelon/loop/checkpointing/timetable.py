"""When a save is due by the clock, without a message in every update.

Ranks' clocks differ, so rank 0's alone is looked at, and only after updates of which all ranks know the number: each look says
when the next one is, from how long updates took. As the moment comes near the looks come closer, about ten for one save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from echelon.world import agree

__all__ = ["Timetable"]

_CHEAP_S = 1.0  # of a save: nobody counts what so short ones cost
_NEAR = 4  # updates: a guess over so few is taken at its word, over more the next look is half way


class Timetable:
    """
    Args:
        every_s: seconds between two saves.
        share: of the time, that saves may take at most: with dear ones the next is later. None is any.
        now: rank 0's clock.
    """

    def __init__(self, every_s: float, share: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._share, self._now = every_s, share, now
        self._cost_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Training begins, or goes on after something else."""
        self._saved_at = self._looked_at = self._now()
        self._updates = self._at_look = self._all = 0  # since the latest save; of these, at the latest look; since the beginning
        self._next = 1

    def saved(self, cost_s: float) -> None:
        """A save began, for whatever reason, for which the loop stopped so long; on all ranks at the same update."""
        self._cost_s = cost_s
        self._saved_at = self._looked_at = self._now()
        # Not half way of what it was before the latest: that may have come early.
        self._updates, self._at_look, self._next = 0, 0, max(1, self._updates // 2)

    def is_due(self) -> bool:
        """Call it after every update. Collective now and then."""
        self._updates += 1
        self._all += 1
        if self._updates < self._next:
            return False
        wait = agree.from_rank0(self._look)
        self._next = self._updates + wait
        return not wait

    def affords_one(self) -> bool:
        """Whether a save for another reason than the clock's is worth its time now. Collective."""
        share = self._share
        if share is None:
            return True
        return agree.from_rank0(lambda: self._cost_s < max(_CHEAP_S, share * (self._now() - self._saved_at)))

    def _look(self) -> int:
        """How many updates until the next look; 0 if a save is due."""
        now = self._now()
        pace = (now - self._looked_at) / max(1, self._updates - self._at_look)
        every = self._every_s if self._share is None else max(self._every_s, self._cost_s / self._share)
        left = every - (now - self._saved_at)
        self._looked_at, self._at_look = now, self._updates
        if left <= pace / 2:
            return 0
        updates = left / pace if pace > 0 else math.inf
        # What was measured over few updates, the first of which compiles, says nothing of many.
        return max(1, int(min(updates if updates <= _NEAR else updates / 2, self._all)))
