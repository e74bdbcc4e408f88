"""Decides that an attempt hangs, and ends it: only if no rank moves any more, for far longer than is usual.

A rank in an echelon loop has a position. It hangs if it keeps that for the time limit, or for several times the limit if it
visibly works (its stack changes, it computes, reads or writes) or is in a phase that is slow by nature. In a user's own code
there is no position, and a long silence is no fault: it may still sort an hour-old file. There an attempt hangs if every rank
waits in a collective for another, or if one is stopped. With a limit that the user gives, a rank also hangs if it does nothing at
all for so long while others wait for it.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from echelon.common.machine import process_stat
from echelon.contracts.pulse import Phase
from echelon.diagnosis.stacks import Frame, main_thread
from echelon.launcher.job import parse_hang_timeout
from echelon.launcher.local.attempt import Attempt
from echelon.launcher.local.gather import RankProbe
from echelon.launcher.local.progress import PATIENT, Progress
from echelon.launcher.local.rank_state import RankState, behind, is_debugged, place_in, waits
from echelon.launcher.local.responder import HOW_FAR
from echelon.launcher.local.watch import positions

__all__ = ["HANG_VARIABLE", "HangLimit", "hang_timeout"]

HANG_VARIABLE = "ECHELON_HANG_TIMEOUT"
_DEFAULT_S = 600.0
_SAMPLE_S = 15.0  # between samples of the stacks and processes of ranks without progress
_ANSWER_S = 0.05
_CPU, _IO_BYTES = 0.05, 256 << 10  # from this share of a core, or these bytes between two samples, a process works
_FEW_CALLS = 12  # collectives begun and ended: up to here a rank may be slow, as in a first step
_BRIEF = (Phase.DATA, Phase.STEP)  # all other phases, also evaluations, have several times the limit


def hang_timeout(given_s: float | None) -> tuple[float, bool]:
    """Seconds without progress after which an attempt is ended, and whether the user gave them.

    `given_s`, else the variable's value, else 600; 0 is never.
    """
    if given_s is not None:
        return given_s, True
    text = os.environ.get(HANG_VARIABLE)
    return (parse_hang_timeout(text, HANG_VARIABLE), True) if text else (_DEFAULT_S, False)


@dataclass
class _Rank:
    """What the last looks showed of one rank.

    Args:
        acted_at: when it last made progress or visibly worked.
        called_at: when it last called a collective, if it is in a loop of its own.
        answered_at: when its interpreter last ran.
        pending: it has called a collective that has not ended.
        stopped_at: since when its process is stopped; None if it runs.
    """

    acted_at: float
    called_at: float
    answered_at: float
    looked_at: float
    called: int = -1
    pending: bool = False
    stopped_at: float | None = None
    stack: tuple[Frame, ...] = ()
    used: tuple[float, int] | None = None

    def shift(self, gap: float) -> None:
        self.acted_at, self.called_at = self.acted_at + gap, self.called_at + gap
        self.answered_at, self.looked_at = self.answered_at + gap, self.looked_at + gap
        if self.stopped_at is not None:
            self.stopped_at += gap

    @property
    def waits(self) -> bool:
        return waits(self.stack, pending=self.pending)


@dataclass
class HangLimit:
    """The limit for the ranks of one node, over all attempts.

    Args:
        after_s: 0 is no limit.
        strict: the user gave the limit.
        progress: updated before each `look`.
        sight: asks the ranks.
        say_after_s: seconds without a collective in loops of their own after which a line is shown.
    """

    after_s: float
    strict: bool
    progress: Progress
    sight: RankProbe
    say_after_s: float
    _said_s: float = 0.0
    _told_of_left: bool = False
    _begun: int = 0
    _sampled_at: float = 0.0
    _held_at: float = -math.inf  # when a debugger last held a rank: until then the others waited for its user
    _ranks: dict[int, _Rank] = field(default_factory=dict)

    @property
    def look_s(self) -> float:
        """Seconds between looks; short for a short limit."""
        return min(0.5, max(0.1, self.after_s / 10)) if self.after_s else 1.0

    def look(self, attempt: Attempt) -> float | None:
        """Seconds without any movement, if these are too many; None otherwise."""
        self._see(attempt)
        return self._hangs() if self.after_s else None

    def _see(self, attempt: Attempt) -> None:
        at, now = self.progress, self.progress.now
        if at.begun != self._begun:
            self._begun, self._ranks, self._sampled_at, self._said_s = at.begun, {}, now, 0.0
            self._held_at, self._told_of_left = -math.inf, False
        self._held_at += at.gap
        for known in self._ranks.values():
            known.shift(at.gap)
        for rank in at.seen:
            self._ranks.setdefault(rank, _Rank(now, now, now, now))
        self._note_stopped(attempt)
        if now - self._sampled_at >= min(_SAMPLE_S, self.after_s / 8 or _SAMPLE_S, self.say_after_s / 4):
            self._sampled_at = now
            self._sample(attempt)

    def _idle_s(self) -> dict[int, float]:
        at = self.progress
        return {rank: at.now - max(at.since[rank], self._ranks[rank].acted_at, self._held_at) for rank in at.seen}

    def _is_held(self, rank: int) -> bool:
        """Whether a debugger holds the rank: the kernel's state t, or Python's own debugger."""
        this = self._ranks[rank]
        return is_debugged(this.stack) or (self.progress.seen[rank].stopped and this.stopped_at is None)

    def _hangs(self) -> float | None:
        at, now, idle = self.progress, self.progress.now, self._idle_s()
        if any(map(self._is_held, at.seen)):
            self._held_at = now
            return None
        known = [r.stopped_at for rank in at.seen if (r := self._ranks[rank]).stopped_at is not None]
        stopped = [now - max(since, self._held_at) for since in known]
        if any(stopped_s > self.after_s for stopped_s in stopped):
            return max(stopped)
        loops = {rank: s for rank, s in at.seen.items() if s.standing.phase not in (Phase.NONE, Phase.ENDED)}
        others = [rank for rank in at.seen if rank not in loops]
        last = behind(loops) or list(loops)
        if not all(self._is_late(rank, idle[rank]) for rank in last):
            return None
        if not all(self._is_stuck(rank, idle[rank]) for rank in others):
            return None
        if not loops and not any(self._ranks[rank].waits for rank in others):
            return None  # all ranks sleep in code of their own, or none is left
        return min(idle[rank] for rank in (*last, *others))

    def quiet(self) -> str | None:
        """A line for the user when ranks in loops of their own have called no collective for long, and one of them waits.

        Shown once, and again each time the silence has doubled; later if a rank visibly works.
        """
        at, idle = self.progress, self._idle_s()
        idle_s = min((at.now - self._ranks[rank].called_at for rank in at.seen), default=0.0)
        works = min(idle.values(), default=0.0) < idle_s / 2
        few = any(self._ranks[rank].called < _FEW_CALLS for rank in at.seen)
        if idle_s < self.say_after_s:
            self._said_s = 0.0
        if idle_s <= max(self.say_after_s * (PATIENT if few or works else 1), 2 * self._said_s):
            return None
        waiting = [rank for rank in at.seen if self._ranks[rank].waits]
        if not waiting or any(s.standing.phase is not Phase.NONE or s.stopped for s in at.seen.values()):
            return None
        self._said_s = idle_s
        seen = self._placed()
        late = [rank for rank in seen if rank not in waiting] or waiting
        return f"no collective for {idle_s:.0f} s: {positions(seen, late, works=works)}"

    def left(self, attempt: Attempt) -> str | None:
        """A line for the user, once, when some ranks ended well and all others wait for a rank: NCCL does not tell them."""
        seen = self.progress.seen
        gone = [rank for rank in attempt.pids if rank not in seen]
        if self._told_of_left or not gone or not seen or not all(self._ranks[rank].waits for rank in seen):
            return None
        self._told_of_left = True
        seen = self._placed()
        who = f"rank {gone[0]} has" if len(gone) == 1 else f"ranks {', '.join(map(str, gone[:16]))} have"
        return f"{who} ended with exit code 0, and the others wait: {positions(seen, list(seen))}"

    def _placed(self) -> dict[int, RankState]:
        """The last seen states, with the places that the last stacks show."""
        return {rank: replace(s, where=place_in(self._ranks[rank].stack)) for rank, s in self.progress.seen.items()}

    def silent_s(self) -> dict[int, float]:
        """Seconds without progress for each rank where that can be seen: by its position, or by its collectives."""
        at, known = self.progress, self.progress.silent_s()
        for rank, this in self._ranks.items() if at.begun == self._begun else ():
            if this.stopped_at is not None:
                known[rank] = max(known.get(rank, 0.0), at.now - this.stopped_at)
            elif rank not in known and this.called >= 0 and rank in at.since:
                known[rank] = at.now - max(at.since[rank], this.acted_at)
        return known

    def _is_late(self, rank: int, idle_s: float) -> bool:
        at = self.progress
        limit_s = max(at.limit_s(rank, self.after_s, _BRIEF), 2 * at.longest_s.get(rank, 0.0))
        return idle_s > limit_s or at.now - max(at.since[rank], self._held_at) > PATIENT * limit_s

    def _is_stuck(self, rank: int, idle_s: float) -> bool:
        """Whether a rank in a user's own code is stuck."""
        this = self._ranks[rank]
        if this.waits:
            return idle_s > self.after_s
        if not self.strict:
            return False
        limit_s = self.after_s * (PATIENT if this.called < _FEW_CALLS else 1)
        return idle_s > limit_s or self.progress.now - max(this.answered_at, self._held_at) > PATIENT * limit_s

    def _note_stopped(self, attempt: Attempt) -> None:
        now = self.progress.now
        for rank, seen in self.progress.seen.items():
            this = self._ranks[rank]
            # A rank that a debugger holds does not count as stopped.
            is_so = seen.stopped and process_stat(attempt.pids[rank])[:1] == ["T"]
            this.stopped_at = (now if this.stopped_at is None else this.stopped_at) if is_so else None

    def _sample(self, attempt: Attempt) -> None:
        """Sample ranks without a position, or with an old one: number of collectives, stack, and use of CPU and I/O."""
        at, now, long_s = self.progress, self.progress.now, self.after_s / 4 or math.inf
        if len(at.seen) < len(attempt.pids):  # the remaining ranks may wait for one that has ended
            long_s = min(long_s, _SAMPLE_S)
        quiet = [r for r, s in at.seen.items() if not s.stopped and (not s.is_known or now - at.since[r] > long_s)]
        for rank in set(self._ranks) - set(quiet):
            moves = self._ranks[rank]
            moves.used, moves.called, moves.stack = None, -1, ()
        answers = self.sight.responders.ask(quiet, HOW_FAR, _ANSWER_S)
        for rank in quiet:
            this, answer, is_known = self._ranks[rank], answers.get(rank), at.seen[rank].is_known
            this.pending = answer is not None and answer.pending
            if answer is not None:
                this.answered_at = now
                if answer.called != this.called:
                    this.called_at = now
                    this.acted_at = now if this.called >= 0 else this.acted_at
                this.called = answer.called
            idle_s = now - max(at.since[rank], this.acted_at)
            still = idle_s > (long_s if is_known else min(long_s, self.say_after_s / 4))
            stack = main_thread(answer.main) if answer is not None and still else ()  # unknown if the rank does not answer
            if this.stack and stack and stack != this.stack:
                this.acted_at = now
            this.stack = stack
            if still:
                # NCCL waits busily, so CPU use does not count there; in a user's own loop a thread may compute while the main one
                # waits (RPC).
                self._note_use(this, attempt.pids[rank], counts=not (is_known and this.waits))
            else:
                this.used = None
            this.looked_at = now

    def _note_use(self, this: _Rank, pid: int, *, counts: bool) -> None:
        now, used = self.progress.now, _used(pid)
        if this.used is not None and counts:
            cpu_s, io_bytes = used[0] - this.used[0], used[1] - this.used[1]
            if cpu_s > _CPU * (now - this.looked_at) or io_bytes > _IO_BYTES:
                this.acted_at = now
        this.used = used


def _used(pid: int) -> tuple[float, int]:
    """CPU seconds, and bytes read and written, of a process and its descendants; 0 where Linux does not tell."""
    cpu_s, io_bytes, pids = 0.0, 0, [pid]
    for each in pids:
        fields = process_stat(each)
        if len(fields) > 14:  # includes ended children
            cpu_s += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        with contextlib.suppress(OSError, ValueError):
            io_bytes += sum(int(line.split()[1]) for line in Path(f"/proc/{each}/io").read_text().splitlines()[:2])
        with contextlib.suppress(OSError, ValueError):
            for thread in os.listdir(f"/proc/{each}/task"):
                pids += map(int, Path(f"/proc/{each}/task/{thread}/children").read_text().split())
    return cpu_s, io_bytes
