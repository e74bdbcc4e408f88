"""One attempt as the launcher sees it: its processes, how they ended, and the requests to them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from echelon.common.files import read_end
from echelon.contracts.records import rank_record
from echelon.contracts.stopping import REQUEUE, signal_name
from echelon.diagnosis.aborted import ABORTS, TAIL_BYTES, abort_message, first_signal
from echelon.diagnosis.failure import Failure
from echelon.diagnosis.stacks import last_traceback
from echelon.launcher.local.memory import OomCount, gib

__all__ = ["Attempt", "Requests"]

# Time for a rank to end by itself after it has reported its failure.
_EXIT_WAIT_S = 10.0


class Requests:
    """Requests to stop and resume later: by signals, which are only counted here, and by a time limit.

    Args:
        stop_after_s: seconds from now; None is no limit.
    """

    def __init__(self, stop_after_s: float | None = None) -> None:
        self.stop_after_s, self.count = stop_after_s, 0
        self._until = time.monotonic() + stop_after_s if stop_after_s is not None else None

    def add(self) -> None:
        self.count += 1

    def time_is_up(self, now: float) -> bool:
        return self._until is not None and now > self._until


class Attempt:
    """One start of all ranks: their processes, and where each leaves its record.

    Attributes:
        pids: process ids by rank.
        ended: for each rank that has ended: (wait status, time in ns on the monotonic clock).
        expected_exits: ranks whose end is no failure, however they ended.
        peaks: for each rank that has ended: its peak memory in bytes.
        oom: counts kills by the OOM killer since the start.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.pids: dict[int, int] = {}
        self.ended: dict[int, tuple[int, int]] = {}
        self.expected_exits: set[int] = set()
        self.peaks: dict[int, int] = {}
        self.oom = OomCount()

    @property
    def running(self) -> list[int]:
        return [rank for rank in self.pids if rank not in self.ended]

    @property
    def dumps(self) -> Path:
        """Folder for the stacks and flight records of this start."""
        return self.folder.parents[1] / "dumps" / self.folder.name

    def record_path(self, rank: int) -> Path:
        return self.folder / f"exit.rank{rank}.json"

    def log_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def failure(self, rank: int) -> Failure | None:
        """How the rank failed; None if it ended well or runs. After writing its record, a rank may still run atexit functions."""
        status, time_ns = self.ended.get(rank, (None, 0))
        if status == 0 or rank in self.expected_exits:
            return None
        record = rank_record(self.record_path(rank)) or {}
        if status is None:
            code = int(record.get("exit_code", 0))
            fails = code not in (0, REQUEUE)
            return Failure.from_record(rank, code, 0, record, self.log_path(rank)) if fails else None
        code = os.waitstatus_to_exitcode(status)
        if code == REQUEUE:
            return None
        if code < 0 and record.get("exit_code", 0) in (0, REQUEUE):
            return self._signalled(rank, -code, time_ns)
        # A signal after the rank recorded its failure came while it ended: torch's threads abort when their device is gone.
        code = code if code >= 0 else 128 - code
        failure = Failure.from_record(rank, code, time_ns, record, self.log_path(rank))
        if not record:  # it may have printed its error itself, and called `os._exit`
            with contextlib.suppress(OSError):
                log = read_end(self.log_path(rank), TAIL_BYTES).decode("utf-8", "replace")
                failure = replace(failure, traceback=last_traceback(log))
        if "killed by signal: Killed" in failure.message and self.oom.since():  # a data worker's end, in torch's words
            failure = replace(failure, message=f"{failure.message}\n(the kernel had no memory left, and killed it)")
        return failure

    def _signalled(self, rank: int, number: int, time_ns: int) -> Failure:
        name, log, words = signal_name(number), self.log_path(rank), ""
        if name in ABORTS:
            with contextlib.suppress(OSError):
                text = read_end(log, TAIL_BYTES).decode("utf-8", "replace")
                name, words = first_signal(name, text), abort_message(text)
        oom, how = self._killed(rank) if number == signal.SIGKILL else (False, "")
        message = f"killed by {name}{how}" + (f"\n{words}" if words else "")
        return Failure(rank, 128 + number, time_ns, name, message, traceback=words, log=log, reported=False, oom=oom)

    def _killed(self, rank: int) -> tuple[bool, str]:
        """Whether the OOM killer killed the rank, and the words for it. The first killed ranks count; later ones only follow."""
        if not self.oom.known:
            return False, " (the OOM killer? `dmesg` shows it)"
        killed = [r for r, (status, _) in self.ended.items() if status == signal.SIGKILL]
        killed.sort(key=lambda r: self.ended[r][1])
        if rank not in killed[: self.oom.since()]:
            return False, ", by a person or a program: the kernel has killed nothing here for want of memory"
        peak, limit = self.peaks.get(rank), self.oom.limit_bytes()
        had = f"; this rank had {gib(peak)} at most" if peak else ""
        return True, f": no memory was left (OOM killer){had}{f', of {gib(limit)} for all processes here' if limit else ''}"

    def stuck(self) -> bool:
        """Whether a rank reported its failure long ago and still runs: a thread or a destructor holds it, and so all others."""
        limit = time.monotonic_ns() - int(_EXIT_WAIT_S * 1e9)
        return any(f.time_ns < limit for rank in self.pids if rank not in self.ended and (f := self.failure(rank)) is not None)

    def exit_codes(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended; -n if signal n ended the rank."""
        return {rank: os.waitstatus_to_exitcode(status) for rank, (status, _) in self.ended.items()}

    def left(self, *, records: bool = True) -> list[int]:
        """The ranks that ended because they were asked to; with `records` also those about to."""
        codes = self.exit_codes()
        stopped = (
            [r for r in self.running if (rank_record(self.record_path(r)) or {}).get("exit_code") == REQUEUE] if records else []
        )
        return [rank for rank, code in codes.items() if code == REQUEUE] + stopped

    def failures(self) -> list[Failure]:
        return [f for rank in self.pids if (f := self.failure(rank)) is not None]
