"""Decides that an attempt hangs, and ends it: only where nothing moves any more, for far longer than it usually takes.

A rank in a loop of echelon's has a position: it hangs when it keeps that for the time limit, or several times as long where it
visibly works (its stack changes, it computes, reads or writes) or is in a phase that takes long by its nature. In a user's own
code there is no position, and a long silence is no fault: the file of an hour ago may still be sorted. There an attempt hangs
when every rank waits in a collective for another, or when one is stopped. A user who gives a limit of their own says more: that a
rank which does nothing at all for so long, while others wait for it, hangs as well.
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
_SAMPLE_S = 15.0  # between looks at stacks and processes, of ranks without progress
_ANSWER_S = 0.05
_CPU, _IO_BYTES = 0.05, 256 << 10  # of a core, and between two looks: from here on a process works
_FEW_CALLS = 12  # collectives begun and ended: what comes before and between them may take long, as a first step does
_BRIEF = (Phase.DATA, Phase.STEP)  # all other phases, evaluations too, have several times as long


def hang_timeout(given_s: float | None) -> tuple[float, bool]:
    """Seconds without progress after which an attempt is ended, and whether a person gave them: `given_s`, else the
    variable's, else 600; 0 never ends one.
    """
    if given_s is not None:
        return given_s, True
    text = os.environ.get(HANG_VARIABLE)
    return (parse_hang_timeout(text, HANG_VARIABLE), True) if text else (_DEFAULT_S, False)


@dataclass
class _Rank:
    """What was seen of one rank at the last looks.

    Args:
        acted_at: when it last made progress, or visibly worked.
        called_at: when it last called a collective, in a loop of its own.
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
    """Of the ranks of one node, of one attempt after another.

    Args:
        after_s: 0 is no limit.
        strict: a person gave it.
        progress: which has looked before.
        sight: asks the ranks.
        say_after_s: after so long without a collective in loops of their own a line is said.
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
    _held_at: float = -math.inf  # when a debugger last held a rank: what others waited until then was for a person
    _ranks: dict[int, _Rank] = field(default_factory=dict)

    @property
    def look_s(self) -> float:
        """How often to look, so that a short limit is kept as well."""
        return min(0.5, max(0.1, self.after_s / 10)) if self.after_s else 1.0

    def look(self, attempt: Attempt) -> float | None:
        """For how long nothing has moved, if that is too long; None where something may."""
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
        """Whether a debugger has it: the kernel's state t, or Python's own."""
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
            return None  # they all sleep, in code of their own, or none is left
        return min(idle[rank] for rank in (*last, *others))

    def quiet(self) -> str | None:
        """A line for people, when ranks in loops of their own have called no collective for long and one waits: once, and again
        when that time has doubled. Where a rank visibly works, it comes later.
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
        """A line for people, once, when ranks have ended well and all others wait for somebody: NCCL tells them nothing."""
        seen = self.progress.seen
        gone = [rank for rank in attempt.pids if rank not in seen]
        if self._told_of_left or not gone or not seen or not all(self._ranks[rank].waits for rank in seen):
            return None
        self._told_of_left = True
        seen = self._placed()
        who = f"rank {gone[0]} has" if len(gone) == 1 else f"ranks {', '.join(map(str, gone[:16]))} have"
        return f"{who} ended with exit code 0, and the others wait: {positions(seen, list(seen))}"

    def _placed(self) -> dict[int, RankState]:
        """As last seen, with where their last stacks say that they are."""
        return {rank: replace(s, where=place_in(self._ranks[rank].stack)) for rank, s in self.progress.seen.items()}

    def silent_s(self) -> dict[int, float]:
        """For how long each rank has made no progress, where that can be seen: by its position, or by its collectives."""
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
        """Of a rank in a user's own code."""
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
            # One that a debugger holds is somebody's business.
            is_so = seen.stopped and process_stat(attempt.pids[rank])[:1] == ["T"]
            this.stopped_at = (now if this.stopped_at is None else this.stopped_at) if is_so else None

    def _sample(self, attempt: Attempt) -> None:
        """Of those that have no position, or have kept it for long: how many collectives, which stack, what the processes do."""
        at, now, long_s = self.progress, self.progress.now, self.after_s / 4 or math.inf
        if len(at.seen) < len(attempt.pids):  # those that are left may wait for one that has ended
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
            stack = (
                main_thread(answer.main) if answer is not None and still else ()
            )  # of one that does not answer nothing is known
            if this.stack and stack and stack != this.stack:
                this.acted_at = now
            this.stack = stack
            if still:
                # NCCL waits busily; but in code of the user's own a thread may compute while the main one waits, as with RPC.
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
    """By a process and all that it has started: seconds of computing, bytes read and written; 0 where Linux does not tell."""
    cpu_s, io_bytes, pids = 0.0, 0, [pid]
    for each in pids:
        fields = process_stat(each)
        if len(fields) > 14:  # with what its ended children took
            cpu_s += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        with contextlib.suppress(OSError, ValueError):
            io_bytes += sum(int(line.split()[1]) for line in Path(f"/proc/{each}/io").read_text().splitlines()[:2])
        with contextlib.suppress(OSError, ValueError):
            for thread in os.listdir(f"/proc/{each}/task"):
                pids += map(int, Path(f"/proc/{each}/task/{thread}/children").read_text().split())
    return cpu_s, io_bytes
