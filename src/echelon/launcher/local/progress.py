"""Since when each rank is where it is, and how long it may be there: steps vary, and some phases take long by their nature."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from echelon.contracts.pulse import Phase, RankProgress
from echelon.launcher.local.rank_state import Pulses, RankState, behind, is_stopped

__all__ = ["PATIENT", "Progress"]

# A first step that compiles, a checkpoint, a user's code between epochs may take so many times as long as a step.
PATIENT = 5
_USUAL_STEPS = 10
_LOOPING = (Phase.EVAL_DATA, Phase.EVAL_STEP, Phase.DATA, Phase.STEP)
_GAP_S = 5.0  # this process was stopped itself, or its machine slept: nothing follows from the time
_FIRST_BEATS = 6  # of two steps


class Progress:
    """Of the ranks of one attempt after another.

    Attributes:
        now: of the latest look, in seconds of the monotonic clock.
        gap: seconds of it in which this process did not run itself, else 0.
        seen: the ranks that run, without their stacks.
        since: when each came to where it is.
        stopped_at: since when each is stopped that is.
        longest_s: the longest time for which each stood and then went on.
        begun: how many attempts there were.
    """

    def __init__(self) -> None:
        self.begun, self.gap = 0, 0.0
        self._pids: Mapping[int, int] = {}
        self._begin({}, 0.0)

    def _begin(self, pids: Mapping[int, int], now: float) -> None:
        self._pids, self.now = pids, now
        self.begun += 1
        self.seen: dict[int, RankState] = {}
        self.known: dict[int, RankProgress] = {}
        self.since: dict[int, float] = {}
        self.longest_s: dict[int, float] = {}
        self.stopped_at: dict[int, float] = {}
        self._evaluates: dict[int, bool] = {}
        self._stepped: dict[int, tuple[int, float | None]] = {}
        self._usual_s: dict[int, float] = {}

    def look(self, pids: Mapping[int, int], running: Sequence[int], pulses: Pulses, now: float | None = None) -> None:
        """Called about once a second, with the processes of an attempt and the ranks that run of it."""
        now = time.monotonic() if now is None else now
        if pids is not self._pids:
            self._begin(pids, now)
        gap, self.now = now - self.now, now
        self.gap = gap if gap > _GAP_S else 0.0
        if self.gap:
            self.since = {rank: since + gap for rank, since in self.since.items()}
            self.stopped_at = {rank: since + gap for rank, since in self.stopped_at.items()}
        self.seen = {rank: RankState(self._note(rank, pulses.read(rank)), is_stopped(pids[rank])) for rank in running}
        self.stopped_at = {rank: self.stopped_at.get(rank, now) for rank, s in self.seen.items() if s.stopped}

    def silent_s(self) -> dict[int, float]:
        """For how long the ranks that have a position have kept it."""
        known = [rank for rank, standing in self.known.items() if standing.phase is not Phase.NONE]
        return {rank: self.now - self.since[rank] for rank in known}

    def _note(self, rank: int, standing: RankProgress) -> RankProgress:
        now = self.now
        if standing == self.known.get(rank):
            return standing
        if rank in self.since and not self.gap:
            self.longest_s[rank] = max(self.longest_s.get(rank, 0.0), now - self.since[rank])
        self.known[rank], self.since[rank] = standing, now
        evaluates = standing.phase in (Phase.EVAL_DATA, Phase.EVAL_STEP)
        count = standing.evaluated if evaluates else standing.step
        if self._evaluates.get(rank) is not evaluates:
            begins = rank not in self._evaluates  # what takes long before the first step tells nothing of the others
            self._evaluates[rank], self._stepped[rank] = evaluates, (count, None if begins else now)
        before, when = self._stepped[rank]
        if count > before:
            if when is not None:
                step_s = (now - when) / (count - before)
                self._usual_s[rank] = 0.7 * self._usual_s.get(rank, step_s) + 0.3 * step_s
            self._stepped[rank] = count, now
        return standing

    def limit_s(self, rank: int, after_s: float, brief: Collection[Phase] = _LOOPING) -> float:
        """How long a rank may stand where it is: `after_s`, or more where its steps are slow or its phase is none of `brief`."""
        standing = self.known[rank]
        limit_s = max(after_s, _USUAL_STEPS * self._usual_s.get(rank, 0.0))
        return limit_s if standing.phase in brief and standing.beats > _FIRST_BEATS else PATIENT * limit_s

    def late(self, after_s: float) -> list[int]:
        """The ranks that hold up the rest, for too long: those that are stopped; those behind; or all of them."""
        stopped = [rank for rank, at in self.stopped_at.items() if self.now - max(at, self.since[rank]) > after_s]
        if stopped:
            return stopped
        looping = {rank: s for rank, s in self.seen.items() if s.standing.phase is not Phase.ENDED}
        if not any(s.is_known for s in looping.values()):
            return []
        begun = {rank: s for rank, s in looping.items() if s.is_known}
        waits = [rank for rank in looping if rank not in begun] or behind(looping) or list(looping)
        return waits if all(self.now - self.since[rank] > self.limit_s(rank, after_s) for rank in waits) else []
