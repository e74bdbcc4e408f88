"""What is seen of a rank from outside: its position, the kernel's state of its process, its Python stack, what it waits in."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.common.machine import process_stat
from echelon.common.traces import from_here
from echelon.contracts import pulse
from echelon.contracts.pulse import Phase, Standing
from echelon.launcher.local.raised import in_library

__all__ = ["Pulses", "Seen", "behind", "has_handler", "is_debugged", "is_stopped", "user_frame", "waits"]

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_MORE_THREADS = re.compile(r"^\.\.\.$", re.MULTILINE)  # faulthandler's, after a hundred; of frames it is indented
_DEBUGGER = re.compile(r"/(pdb|bdb)\.py\"|/(debugpy|pydevd[^/]*|IPython)/")
# Of torch: files whose calls into C++ wait for other ranks, through which files they go, and what other files call so.
_COLLECTIVES = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives(_impl)?|rendezvous)\.py$")
_PASSES_ON = re.compile(r"/torch/(_ops\.py$|_library/)")
_WAITING_CALL = re.compile(r"\.wait\(|\._broadcast_coalesced\(|\._verify_params_across_processes\(")
_CALLS, _BACKWARD = "/torch/distributed/rpc/", "/torch/autograd/"


@dataclass(frozen=True)
class Seen:
    """What is known of a rank at one moment.

    Args:
        stopped: its process exists and does not run.
        where: its innermost frame in the user's code, as "train.py:30 in load"; empty if it did not answer.
        silent_s: since it was last seen to make progress; None where that cannot be seen.
        waits_in: the collective in which it is, as "all_reduce #118"; empty if in none, or not known.
        answers: whether its interpreter ran; None if it was not asked.
        raised: the exception that it was handling, as `raised.describe` has it; None if none, or not known.
    """

    standing: Standing
    stopped: bool = False
    where: str = ""
    silent_s: float | None = None
    waits_in: str = ""
    answers: bool | None = None
    raised: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        at = self.standing
        return {
            "at": [at.step, at.phase, at.evaluated, at.beats],
            "stopped": self.stopped,
            "where": self.where,
            "silent_s": None if self.silent_s is None else round(self.silent_s, 3),
            "waits_in": self.waits_in,
            "answers": self.answers,
            **({"raised": dict(self.raised)} if self.raised is not None else {}),
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Seen:
        """From what `as_json` gave, as `records.exit_record` has checked it."""
        step, phase, evaluated, beats = said["at"]
        more = {name: said[name] for name in ("silent_s", "waits_in", "answers", "raised") if name in said}
        return cls(Standing(step, Phase(phase), evaluated, beats), said["stopped"], said["where"], **more)

    @property
    def is_known(self) -> bool:
        return self.standing.phase not in (Phase.NONE, Phase.ENDED)

    def __str__(self) -> str:
        parts = [str(self.standing)] if self.is_known else []
        parts += [f"in {self.waits_in}"] if self.waits_in else []
        return ", ".join([*parts, *([f"at {self.where}"] if self.where else [])])


class Pulses:
    """The pulses of one attempt's ranks."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._told: dict[int, str] = {}

    def make(self, rank: int) -> int:
        self._fds[rank] = pulse.make()
        return self._fds[rank]

    def read(self, rank: int) -> Standing:
        return pulse.read(self._fds[rank]) if rank in self._fds else Standing()

    def ask(self, rank: int, send: Callable[[int], None]) -> None:
        if rank in self._fds:
            self._told.pop(rank, None)
            pulse.ask_stack(self._fds[rank])
            send(rank)

    def note_stacks(self, rank: int, stacks: str) -> None:
        """As the rank itself has given them, in place of what it writes when it is asked by a signal."""
        self._told[rank] = stacks

    def stack(self, rank: int) -> str:
        """Of all its threads, the main one last, as it was last told; empty if nothing was."""
        return self._told.get(rank) or (pulse.stack(self._fds[rank]) if rank in self._fds else "")

    def main_stack(self, rank: int) -> str:
        """Of the main thread, which comes last: its frames, the innermost first; empty if there are too many other threads."""
        last = re.split(r"^(?:Current thread|Thread) .*\n", self.stack(rank), flags=re.MULTILINE)[-1]
        return "" if _MORE_THREADS.search(last) else last

    def where(self, rank: int) -> str:
        """Of the main thread: the innermost frame that is no library's."""
        return user_frame(self.main_stack(rank))

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


def user_frame(main_stack: str) -> str:
    """As "train.py:30 in load"; empty if there is none."""
    for line in main_stack.splitlines():
        if (frame := _FRAME.fullmatch(line.rstrip())) and not frame[1].startswith("<") and not in_library(frame[1]):
            return f"{from_here(frame[1])}:{frame[2]} in {frame[3]}"
    return ""


def is_stopped(pid: int) -> bool:
    """Whether a process exists and does not run: the kernel's state T."""
    return process_stat(pid)[:1] in (["T"], ["t"])


def has_handler(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would else end it; where Linux does not tell, it is taken to."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return not os.path.exists("/proc/self/status")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is None or bool(int(caught[1], 16) >> (number - 1) & 1)


def is_debugged(main_stack: str) -> bool:
    """Whether a person is at it, in a debugger of Python's."""
    return _DEBUGGER.search(main_stack) is not None


def waits(main_stack: str, *, pending: bool) -> bool:
    """Whether the main thread waits for other ranks. Who saves a checkpoint with torch does not: it may wait for a slow disk.

    Args:
        main_stack: as `Pulses.main_stack` gives it.
        pending: torch says that a collective has begun and not ended; on gloo it may go on saying so after the last of all.
    """
    frames = map(_FRAME.match, main_stack.splitlines())
    frame = next((found for found in frames if found is None or not _PASSES_ON.search(found[1])), None)
    if frame is None or _CALLS in frame[1]:  # which a thread may be serving
        return False
    if _COLLECTIVES.search(frame[1]):
        return True
    return pending and (_BACKWARD in frame[1] or _WAITING_CALL.search(linecache.getline(frame[1], int(frame[2]))) is not None)


def behind(seen: Mapping[int, Seen]) -> list[int]:
    """The ranks that have not come as far as others. None where all are equally far, or one's position is not known."""
    at = {rank: s.standing.position for rank, s in seen.items()}
    if not at or any(s.standing.phase is Phase.NONE for s in seen.values()):
        return []
    least = min(at.values())
    return [rank for rank, position in at.items() if position == least] if max(at.values()) != least else []
