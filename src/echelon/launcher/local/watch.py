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

from echelon.launcher.job import Failure, parse_duration
from echelon.launcher.local.progress import Progress
from echelon.launcher.local.signs import Pulses, Seen, behind

__all__ = ["HUNG", "STALL_VARIABLE", "Watch", "blame", "hung", "positions", "stall_after"]

STALL_VARIABLE = "ECHELON_STALL_AFTER"
_DEFAULT_S = 60.0
HUNG = 124  # the exit code, as `timeout` has it


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


def hung(seen: Mapping[int, Seen], idle_s: float, log: Callable[[int], Path]) -> list[Failure]:
    """The failure of an attempt that was ended since nothing moved: of each rank that held up the others, else of all that ran.

    Args:
        seen: of the ranks that ran.
        log: of a rank.
    """
    stopped = [rank for rank, s in seen.items() if s.stopped]
    mute = [rank for rank, s in seen.items() if s.answers is False]
    waiting = [rank for rank, s in seen.items() if s.waits_in]
    absent = [rank for rank in seen if rank not in waiting] if waiting else []
    guilty = stopped or behind(seen) or mute or absent
    what = "it is stopped, as by SIGSTOP or a debugger" if stopped else "it is behind the others"
    now, message = time.monotonic_ns(), positions(seen, guilty or list(seen))
    return [
        Failure(
            rank,
            HUNG,
            now,
            "stopped" if stopped else "behind" if guilty else "hang",
            message,
            log=log(rank),
            headline=f"rank {rank} made no progress for {idle_s:.0f} s: {what}" if guilty else f"no progress for {idle_s:.0f} s",
        )
        for rank in sorted(guilty or seen)
    ]


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
        self.progress = Progress()
        self._begin()

    def _begin(self) -> None:
        self._begun = self.progress.begun
        self._asked, self._said_s, self._late_since = False, 0.0, 0.0

    def look(self, pids: Mapping[int, int], running: Sequence[int], pulses: Pulses, now: float | None = None) -> None:
        """Called about once a second, with the processes of an attempt and the ranks that run of it."""
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
        self._late_since = max(at.since[rank] for rank in late)
        idle_s = at.now - self._late_since
        if idle_s < 2 * self._said_s:
            return
        if not self._asked:  # the answers are there at the next look
            self._asked = True
            for rank, s in at.seen.items():
                if not s.stopped:
                    pulses.ask(rank, self._send)
            return
        self._asked, self._said_s = False, idle_s
        seen = {rank: s if s.stopped else replace(s, where=pulses.where(rank)) for rank, s in at.seen.items()}
        self._say(f"no step for {idle_s:.0f} s: {positions(seen, late)}")


def positions(seen: Mapping[int, Seen], late: Sequence[int]) -> str:
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
    return "; ".join(parts)
