"""Watches for ranks without progress, and reports which is behind, at which line.

Reports hold only what was seen: each rank's position (`contracts.pulse`), the kernel's state of its process, and its Python
stack. A rank that runs a loop of its own has no position; for it, only the stack and a stopped process are known.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from echelon.launcher.job import parse_duration
from echelon.launcher.local.attempt import Attempt
from echelon.launcher.local.progress import Progress
from echelon.launcher.local.rank_state import Pulses, RankState

__all__ = ["STALL_VARIABLE", "Lingering", "Watch", "positions", "stall_after"]

STALL_VARIABLE = "ECHELON_STALL_AFTER"
_DEFAULT_S = 60.0


def stall_after(given_s: float | None) -> float:
    """Seconds without a step after which a report is shown: `given_s`, else the variable's value, else 60."""
    if given_s is not None:
        return given_s
    text = os.environ.get(STALL_VARIABLE)
    return parse_duration(text, STALL_VARIABLE) if text else _DEFAULT_S


class Watch:
    """Reports now and then that no rank makes a step, and which rank is behind.

    Args:
        after_s: seconds without a step before a report; at least several times the usual duration of a step.
        say: shows a line.
        ask: asks ranks for their stacks, which arrive by the next look.
    """

    def __init__(self, after_s: float, say: Callable[[str], None], ask: Callable[[Sequence[int]], None]) -> None:
        self._after_s, self._say, self._ask = after_s, say, ask
        self.progress = Progress()
        self._begin()

    def _begin(self) -> None:
        self._begun = self.progress.begun
        self._asked, self._said_s, self._late_since = False, 0.0, 0.0

    def look(self, pids: Mapping[int, int], running: Sequence[int], pulses: Pulses, now: float | None = None) -> None:
        """Called about once a second, with the processes of an attempt and its running ranks."""
        at = self.progress
        at.look(pids, running, pulses, now)
        if at.begun != self._begun:
            self._begin()
        self._late_since += at.gap
        late = at.late(self._after_s)
        if not late:
            if self._said_s and any(at.since[rank] > self._late_since for rank in at.seen):
                self._say(f"steps go on, after {at.now - self._late_since:.0f} s")
                self._said_s = 0.0
            self._asked = False
            return
        self._late_since = max(max(at.since[rank], at.stopped_at.get(rank, 0.0)) for rank in late)
        idle_s = at.now - self._late_since
        if idle_s < 2 * self._said_s:
            return
        if not self._asked:
            self._asked = True
            self._ask([rank for rank, s in at.seen.items() if not s.stopped])
            return
        self._asked, self._said_s = False, idle_s
        seen = {rank: s if s.stopped else replace(s, where=pulses.where(rank)) for rank, s in at.seen.items()}
        self._say(f"no step for {idle_s:.0f} s: {positions(seen, late)}")


def positions(seen: Mapping[int, RankState], late: Sequence[int], *, works: bool = False) -> str:
    """A line with the late ranks first, then the others; ranks in the same state together.

    Args:
        works: the late ranks visibly work.
    """
    rest = [rank for rank in seen if rank not in late]
    parts = []
    late_ones = ("works" if works else "is behind") if rest else "stands"
    for ranks, what in ((late, late_ones), (rest, "waits" if len(late) < len(seen) else "")):
        alike: dict[str, list[int]] = {}
        for rank in ranks:
            how = "is stopped, as by SIGSTOP or a debugger" if seen[rank].stopped else what
            alike.setdefault(f"{how}|{seen[rank]}", []).append(rank)
        for text, who in alike.items():
            how, _, stands = text.partition("|")
            of_several = re.sub(r"^(\w+)s\b", r"\1", how.replace("is ", "are ", 1))
            which = f"rank {who[0]} {how}" if len(who) == 1 else f"ranks {', '.join(map(str, who))} {of_several}"
            parts.append(f"{which}{f', {stands}' if stands else ''}")
    return "; ".join(parts)


class Lingering:
    """Reports what keeps the process of a rank whose program has ended, since the other ranks wait for that process.

    It ends no process: a thread may write to a slow disk.

    Args:
        after_s: seconds that a process may take to end.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._attempt: Attempt | None = None
        self._since: dict[int, float] = {}
        self._said = set[int]()

    def look(self, attempt: Attempt) -> str | None:
        """A line for the user, once per rank; called about once a second."""
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
            f"{who} {has} come to the end of the program, and {its} {runs} on for {self._after_s:.0f} s: a non-daemon "
            f"thread, or a function given to atexit, has not ended"
        )
