"""Since when each rank is where it is, and how long it may stay: steps vary, and some phases are slow by nature."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from echelon.contracts.pulse import Phase, RankProgress
from echelon.launcher.local.rank_state import Pulses, RankState, behind, is_stopped

__all__ = ["PATIENT", "Progress"]

# A first step that compiles, a checkpoint, or a user's code between epochs may take this many times as long as a step.
PATIENT = 5
_USUAL_STEPS = 10
_LOOPING = (Phase.EVAL_DATA, Phase.EVAL_STEP, Phase.DATA, Phase.STEP)
_GAP_S = 5.0  # a longer gap between looks: this process was stopped, or its machine slept
_FIRST_BEATS = 6  # of two steps


class Progress:
    """The progress of the ranks of one attempt after another.

    Attributes:
        now: time of the latest look, on the monotonic clock.
        gap: seconds before it in which this process itself did not run, else 0.
        seen: the running ranks, without their stacks.
        since: when each rank reached its position.
        stopped_at: since when each stopped rank is stopped.
        longest_s: the longest time that each rank stayed at a position before it went on.
        begun: number of attempts.
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
        """Called about once a second, with the processes of an attempt and its running ranks."""
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
        """Seconds that each rank with a position has kept it."""
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
            begins = rank not in self._evaluates  # the time before the first step says nothing about later ones
            self._evaluates[rank], self._stepped[rank] = evaluates, (count, None if begins else now)
        before, when = self._stepped[rank]
        if count > before:
            if when is not None:
                step_s = (now - when) / (count - before)
                self._usual_s[rank] = 0.7 * self._usual_s.get(rank, step_s) + 0.3 * step_s
            self._stepped[rank] = count, now
        return standing

    def limit_s(self, rank: int, after_s: float, brief: Collection[Phase] = _LOOPING) -> float:
        """Seconds that a rank may stay where it is: `after_s`, or more if its steps are slow or its phase is not in `brief`."""
        standing = self.known[rank]
        limit_s = max(after_s, _USUAL_STEPS * self._usual_s.get(rank, 0.0))
        return limit_s if standing.phase in brief and standing.beats > _FIRST_BEATS else PATIENT * limit_s

    def late(self, after_s: float) -> list[int]:
        """The ranks that have held up the rest for too long: stopped ranks, else those behind, else all."""
        stopped = [rank for rank, at in self.stopped_at.items() if self.now - max(at, self.since[rank]) > after_s]
        if stopped:
            return stopped
        looping = {rank: s for rank, s in self.seen.items() if s.standing.phase is not Phase.ENDED}
        if not any(s.is_known for s in looping.values()):
            return []
        begun = {rank: s for rank, s in looping.items() if s.is_known}
        waits = [rank for rank in looping if rank not in begun] or behind(looping) or list(looping)
        return waits if all(self.now - self.since[rank] > self.limit_s(rank, after_s) for rank in waits) else []
