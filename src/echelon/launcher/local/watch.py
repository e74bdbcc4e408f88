"""Watches for ranks without progress: which is behind, at which line, and which to blame when others time out.

What is said was seen: the position of each rank (`contracts.pulse`), the kernel's state of its process, its Python stack. A rank
that runs a loop of its own has no position; of that, only a stopped process and the stacks are known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from echelon.contracts.pulse import Phase, Standing
from echelon.launcher.job import Failure, parse_duration
from echelon.launcher.local.signs import Pulses, Seen, behind, is_stopped

__all__ = ["STALL_VARIABLE", "Watch", "blame", "stall_after"]

STALL_VARIABLE = "ECHELON_STALL_AFTER"
_DEFAULT_S = 60.0
# Steps vary; and what takes long by its nature (a first step that compiles, a checkpoint, a user's code between epochs) longer.
_USUAL_STEPS, _PATIENT = 10, 5
_LOOPING = (Phase.EVAL_DATA, Phase.EVAL_STEP, Phase.DATA, Phase.STEP)
_GAP_S = 5.0  # this process was stopped itself: nothing follows from the time
_FIRST_BEATS = 6  # of two steps


def stall_after(given_s: float | None) -> float:
    """Seconds without a step after which something is said: `given_s`, else the variable's, else 60."""
    if given_s is not None:
        return given_s
    text = os.environ.get(STALL_VARIABLE)
    return parse_duration(text) if text else _DEFAULT_S


def blame(failures: Sequence[Failure], seen: Mapping[int, Seen]) -> list[Failure]:
    """`failures`, and who is to blame if they all only waited: a rank that is stopped, else one that is behind all of them.

    Args:
        seen: of all ranks; those that have not failed still run.
    """
    waited = [f for f in failures if f.waited]
    if not waited or not all(f.is_victim for f in failures):
        return list(failures)
    first, failed = Failure.first(waited), {f.rank for f in failures}
    running = {rank: s for rank, s in seen.items() if rank not in failed}
    least = behind(seen)
    guilty = [rank for rank, s in running.items() if s.stopped] or (least if set(least) <= set(running) else [])
    if not running:  # NCCL's watchdog ends also those that were not waiting, once it hears of the others
        waiting = {f.rank for f in waited}
        guilty = [rank for rank in least if rank not in waiting]
    if guilty:
        return [*failures, *(_culprit(rank, seen[rank], first) for rank in guilty)]
    if not running:
        return list(failures)
    hint = "; ".join(f"rank {rank} still ran{f', {s}' if str(s) else ''}" for rank, s in sorted(running.items()))
    text = f"{first.message}\n(it waited for other ranks until its timeout: {hint})"
    headline = f"rank {first.rank} gave up waiting for the others"
    return [replace(f, message=text, headline=headline) if f is first else f for f in failures]


def _culprit(rank: int, seen: Seen, first: Failure) -> Failure:
    done = f"rank {rank} made no progress since step {seen.standing.step}" if seen.is_known else f"rank {rank} made no progress"
    how = "it is stopped, as by SIGSTOP or a debugger" if seen.stopped else "it is behind the others"
    stood = [f"it stood {seen}"] if str(seen) else []
    message = "\n".join([*stood, f"rank {first.rank} waited for it and gave up:", f"{first.kind}: {first.message}"])
    log = first.log.with_name(f"rank{rank}.log") if isinstance(first.log, Path) else None
    kind, headline = "stopped" if seen.stopped else "behind", f"{done}: {how}"
    return Failure(rank, first.exit_code, first.time_ns, kind, message, first.user_frames, log=log, headline=headline)


class Watch:
    """Reports now and then that no step is made, and which rank is behind.

    Args:
        after_s: without a step for so long, and for several times as long as steps usually take.
        say: shows a line.
        send: asks the rank for its stack.
    """

    def __init__(self, after_s: float, say: Callable[[str], None], send: Callable[[int], None]) -> None:
        self._after_s, self._say, self._send = after_s, say, send
        self._pids: Mapping[int, int] = {}
        self._begin({}, 0.0)

    def _begin(self, pids: Mapping[int, int], now: float) -> None:
        self._pids, self._looked_at = pids, now
        self._known: dict[int, Standing] = {}
        self._since: dict[int, float] = {}
        self._evaluates: dict[int, bool] = {}
        self._stepped: dict[int, tuple[int, float]] = {}
        self._usual_s: dict[int, float] = {}
        self._asked, self._said_s, self._late_since = False, 0.0, 0.0

    def look(self, pids: Mapping[int, int], running: Sequence[int], pulses: Pulses, now: float | None = None) -> None:
        """Called about once a second, with the processes of an attempt and the ranks that run of it."""
        now = time.monotonic() if now is None else now
        if pids is not self._pids:
            self._begin(pids, now)
        gap, self._looked_at = now - self._looked_at, now
        if gap > _GAP_S:
            self._since = {rank: since + gap for rank, since in self._since.items()}
            self._late_since += gap
        seen = {rank: Seen(self._note(rank, pulses.read(rank), now), is_stopped(pids[rank])) for rank in running}
        late = self._late(seen, now)
        if not late:
            if self._said_s and any(self._since[rank] > self._late_since for rank in seen):
                self._say(f"steps go on, after {now - self._late_since:.0f} s")
                self._said_s = 0.0
            self._asked = False
            return
        self._late_since = max(self._since[rank] for rank in late)
        idle_s = now - self._late_since
        if idle_s < 2 * self._said_s:
            return
        if not self._asked:  # the answers are there at the next look
            self._asked = True
            for rank in seen:
                if not seen[rank].stopped:
                    pulses.ask(rank, self._send)
            return
        self._asked, self._said_s = False, idle_s
        where = {rank: "" if s.stopped else pulses.where(rank) for rank, s in seen.items()}
        self._say(_line({r: Seen(s.standing, s.stopped, where[r]) for r, s in seen.items()}, late, idle_s))

    def silent_s(self) -> dict[int, float]:
        """For how long the ranks that have a position have kept it, as of the last look."""
        known = {rank for rank, standing in self._known.items() if standing.phase is not Phase.NONE}
        return {rank: self._looked_at - since for rank, since in self._since.items() if rank in known}

    def _note(self, rank: int, standing: Standing, now: float) -> Standing:
        if standing == self._known.get(rank):
            return standing
        self._known[rank], self._since[rank] = standing, now
        evaluates = standing.phase in (Phase.EVAL_DATA, Phase.EVAL_STEP)
        count = standing.evaluated if evaluates else standing.step
        if self._evaluates.get(rank) is not evaluates:
            self._evaluates[rank], self._stepped[rank] = evaluates, (count, now)
        before, when = self._stepped[rank]
        if count > before:
            step_s = (now - when) / (count - before)
            self._usual_s[rank] = 0.7 * self._usual_s.get(rank, step_s) + 0.3 * step_s
            self._stepped[rank] = count, now
        return standing

    def _limit_s(self, rank: int) -> float:
        standing = self._known[rank]
        limit_s = max(self._after_s, _USUAL_STEPS * self._usual_s.get(rank, 0.0))
        return limit_s if standing.phase in _LOOPING and standing.beats > _FIRST_BEATS else _PATIENT * limit_s

    def _late(self, seen: Mapping[int, Seen], now: float) -> list[int]:
        """The ranks that hold up the rest, for too long: those that are stopped; those behind; or all of them."""
        stopped = [rank for rank, s in seen.items() if s.stopped and now - self._since[rank] > self._after_s]
        if stopped:
            return stopped
        looping = {rank: s for rank, s in seen.items() if s.standing.phase is not Phase.ENDED}
        if not any(s.is_known for s in looping.values()):
            return []
        begun = {rank: s for rank, s in looping.items() if s.is_known}
        waits = [rank for rank in looping if rank not in begun] or behind(looping) or list(looping)
        return waits if all(now - self._since[rank] > self._limit_s(rank) for rank in waits) else []


def _line(seen: Mapping[int, Seen], late: Sequence[int], idle_s: float) -> str:
    """Who is late first, then where the others stand; ranks that stand alike together."""
    rest = [rank for rank in seen if rank not in late]
    parts = []
    for ranks, what in ((late, "is behind" if rest else "stands"), (rest, "waits" if len(late) < len(seen) else "")):
        alike: dict[str, list[int]] = {}
        for rank in ranks:
            how = "is stopped, as by SIGSTOP or a debugger" if seen[rank].stopped else what
            alike.setdefault(f"{how}|{seen[rank]}", []).append(rank)
        for text, who in alike.items():
            how, _, stands = text.partition("|")
            parts.append(f"rank {', '.join(map(str, who))} {how}{f', {stands}' if stands else ''}")
    return f"no step for {idle_s:.0f} s: {'; '.join(parts)}"
