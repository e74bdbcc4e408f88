"""Says of a rank whose program has ended well, and whose process runs on, what keeps it: everybody waits, and nothing moves."""

from __future__ import annotations

import os
import time

from echelon.launcher.local.attempt import Attempt

__all__ = ["Lingering"]


class Lingering:
    """Of the ranks of one attempt after another. It ends nothing: a thread may write to a slow disk.

    Args:
        after_s: a process may take so long to end.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._attempt: Attempt | None = None
        self._since: dict[int, float] = {}
        self._said = set[int]()

    def look(self, attempt: Attempt) -> str | None:
        """A line for people, once for each rank; called about once a second."""
        if attempt is not self._attempt:
            self._attempt, self._since, self._said = attempt, {}, set()
        now = time.monotonic()
        for rank in attempt.running:
            if rank not in self._since and os.path.lexists(attempt.record_path(rank)):
                self._since[rank] = now
        late = [rank for rank in attempt.running if now - self._since.get(rank, now) > self._after_s and rank not in self._said]
        if not late:
            return None
        self._said.update(late)
        several = len(late) > 1
        who = f"rank{'s' if several else ''} {', '.join(map(str, late))}"
        has, its, runs = ("have", "their processes", "run") if several else ("has", "its process", "runs")
        return (
            f"{who} {has} come to the end of the program, and {its} {runs} on for {self._after_s:.0f} s: a thread that is no "
            f"daemon, or a function given to atexit, has not ended"
        )
