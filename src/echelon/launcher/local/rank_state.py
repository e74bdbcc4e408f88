"""A rank as seen from outside: its position, the kernel's state of its process, its Python stack, and what it waits in."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.common.machine import process_stat
from echelon.contracts import pulse
from echelon.contracts.pulse import Phase, RankProgress
from echelon.diagnosis.stacks import Frame, main_thread, user_frame

__all__ = ["Pulses", "RankState", "behind", "has_handler", "is_debugged", "is_stopped", "place_in", "waits"]

_DEBUGGER = re.compile(r"/(pdb|bdb)\.py$|/(debugpy|pydevd[^/]*|IPython)/")
# Files of torch: those whose calls into C++ wait for other ranks, those that such calls pass through, and calls elsewhere that
# wait.
_COLLECTIVES = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives(_impl)?|rendezvous)\.py$")
_PASSES_ON = re.compile(r"/torch/(_ops\.py$|_library/)")
_WAITING_CALL = re.compile(r"\.wait\(|\._broadcast_coalesced\(|\._verify_params_across_processes\(")
_CALLS, _BACKWARD = "/torch/distributed/rpc/", "/torch/autograd/"


@dataclass(frozen=True)
class RankState:
    """What is known of a rank at one moment.

    Args:
        stopped: its process exists but does not run.
        where: its innermost frame in the user's code, as "train.py:30 in load"; empty if it did not answer.
        silent_s: seconds since its last visible progress; None if progress cannot be seen.
        answers: whether its interpreter ran; None if it was not asked.
        ended: its exit code, or -n if signal n ended it; None if it ran.
        raised: the exception that it was handling, from `raised.describe`; None if there was none, or it is unknown.
    """

    standing: RankProgress
    stopped: bool = False
    where: str = ""
    silent_s: float | None = None
    answers: bool | None = None
    ended: int | None = None
    raised: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        at = self.standing
        return {
            "at": [at.step, at.phase, at.evaluated, at.beats],
            "stopped": self.stopped,
            "where": self.where,
            "silent_s": None if self.silent_s is None else round(self.silent_s, 3),
            "answers": self.answers,
            "ended": self.ended,
            **({"raised": dict(self.raised)} if self.raised is not None else {}),
        }

    @property
    def is_known(self) -> bool:
        return self.standing.phase not in (Phase.NONE, Phase.ENDED)

    def __str__(self) -> str:
        parts = [str(self.standing)] if self.is_known else []
        return ", ".join([*parts, *([f"at {self.where}"] if self.where else [])])


class Pulses:
    """The pulses of one attempt's ranks."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._told: dict[int, str] = {}

    def make(self, rank: int) -> int:
        self._fds[rank] = pulse.make()
        return self._fds[rank]

    def read(self, rank: int) -> RankProgress:
        return pulse.read(self._fds[rank]) if rank in self._fds else RankProgress()

    def ask(self, rank: int, send: Callable[[int], None]) -> None:
        if rank in self._fds:
            self._told.pop(rank, None)
            pulse.ask_stack(self._fds[rank])
            send(rank)

    def note_stacks(self, rank: int, stacks: str) -> None:
        """Take the stacks that the rank itself sent, in place of those it writes on a signal."""
        self._told[rank] = stacks

    def stack(self, rank: int) -> str:
        """The last known stacks of all its threads, the main one last; empty if there are none."""
        return self._told.get(rank) or (pulse.stack(self._fds[rank]) if rank in self._fds else "")

    def main_stack(self, rank: int) -> tuple[Frame, ...]:
        return main_thread(self.stack(rank))

    def where(self, rank: int) -> str:
        return place_in(self.main_stack(rank))

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


def place_in(frames: Sequence[Frame]) -> str:
    """The innermost frame that is not in a library, as "train.py:30 in load"; empty if there is none."""
    return str(user_frame(frames) or "")


def is_stopped(pid: int) -> bool:
    """Whether a process exists but does not run: the kernel's state T, or t under a debugger."""
    return process_stat(pid)[:1] in (["T"], ["t"])


def has_handler(pid: int, number: int) -> bool:
    """Whether a process handles a signal that would end it otherwise; True where Linux does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return not os.path.exists("/proc/self/status")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is None or bool(int(caught[1], 16) >> (number - 1) & 1)


def is_debugged(frames: Sequence[Frame]) -> bool:
    """Whether the rank is in a Python debugger, with a user at it."""
    return any(_DEBUGGER.search(frame.file) for frame in frames)


def waits(frames: Sequence[Frame], *, pending: bool) -> bool:
    """Whether the main thread waits for other ranks. Saving a checkpoint with torch does not count: it may wait for a slow disk.

    Args:
        frames: of the main thread, innermost first.
        pending: by torch, a collective has begun and not ended; on gloo this may stay so after the very last one.
    """
    frame = next((each for each in frames if not _PASSES_ON.search(each.file)), None)
    if frame is None or _CALLS in frame.file:  # a thread may be serving the call
        return False
    if _COLLECTIVES.search(frame.file):
        return True
    return pending and (_BACKWARD in frame.file or _WAITING_CALL.search(linecache.getline(frame.file, frame.line)) is not None)


def behind(seen: Mapping[int, RankState]) -> list[int]:
    """The ranks that are behind others; empty if all are equally far, or a rank's position is unknown."""
    at = {rank: s.standing.position for rank, s in seen.items()}
    if not at or any(s.standing.phase is Phase.NONE for s in seen.values()):
        return []
    least = min(at.values())
    return [rank for rank, position in at.items() if position == least] if max(at.values()) != least else []
