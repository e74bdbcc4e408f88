"""Run a job of one rank in this very process: `breakpoint()` and an interactive debugger work.

Its output also goes to the rank's log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from echelon.contracts.rank import RankInfo
from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE, SIGNALS
from echelon.launcher.failure import render
from echelon.launcher.job import Failure, JobSpec, Outcome
from echelon.launcher.local.attempt import write_exit
from echelon.launcher.local.hang import hang_timeout
from echelon.launcher.local.here_hang import HangHere
from echelon.launcher.local.judge import record_end
from echelon.launcher.local.nodes import free_port
from echelon.launcher.local.output import output_to
from echelon.launcher.local.placement import bound
from echelon.launcher.local.processes import kill_children
from echelon.launcher.local.run import path_without_launcher, rank_environment
from echelon.launcher.local.worker import Start, end, run_program
from echelon.launcher.records import rank_record

__all__ = ["run_here"]

# How long the program may take to react to SIGTERM, after the whole grace time.
_LAST_WAIT_S = 5.0


def run_here(job: JobSpec, run: RunDir) -> Outcome:
    """Run a job of one rank. Returns its exit code with its failure; 75 when it ended to be started again later."""
    info = RankInfo(rank=0, world_size=1, run_id=run.name)
    env = rank_environment(job, run, os.environ, 1, restart=job.restart)
    # Without a group to join, a world of one needs no address; scripts that insist on env:// find a free port.
    _, place = bound(0, 1, {**os.environ, **job.env}, devices=job.own_device)
    os.environ.update({**env, **place, **info.to_env(), "MASTER_PORT": str(free_port())})
    log, record, ended = run.log(0), run.rank_exit(0), run.exit_json.absolute()
    folder = os.getcwd()
    start = Start(
        job.kind,
        job.target,
        job.args,
        {},
        folder,
        path_without_launcher(),
        log=str(log.absolute()),
        record=str(record.absolute()),
        flight=str(run.flight(0).absolute()),
    )
    pid, before = os.getpid(), {number: signal.getsignal(number) for number in SIGNALS}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # until `run_program` has a handler
    limit = _TimeLimit(job.stop_after_s, job.grace_s, lambda: write_exit(ended, REQUEUE)) if job.stop_after_s else None
    hang_s, given = hang_timeout(job.hang_timeout_s)
    hang = HangHere(run, hang_s, _show) if given and hang_s else None
    with output_to(log) as copy:
        out, err = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(out, copy), _Tee(err, copy)
        try:
            code = run_program(start)
            if os.getpid() != pid:  # a child that the program forked and that came back here
                end(code)
        finally:
            sys.stdout, sys.stderr = out, err
            with contextlib.suppress(OSError):  # the run's folder may be known by a relative name, and the program elsewhere
                os.chdir(folder)
    for each in (limit, hang):
        if each is not None:
            each.lift()
    for number, handler in before.items():
        signal.signal(number, handler)
    failure = Failure.from_record(0, code, 0, rank_record(record) or {}, log) if code not in (0, REQUEUE) else None
    record_end(run, code, [failure] if failure else [], world_size=1)
    return Outcome(code, failure)


def _show(failure: Failure) -> None:
    os.write(2, (b"\x1b[?25h" if os.isatty(2) else b"") + f"{render(failure, 1)}\n".encode(errors="replace"))


class _TimeLimit(threading.Thread):
    """After a time, asks this process to save and end, as the launcher asks ranks: SIGUSR1, SIGTERM, then its end.

    Args:
        end: called before this process is ended by force.
    """

    def __init__(self, stop_after_s: float, grace_s: float, end: Callable[[], None]) -> None:
        super().__init__(name="echelon-time-limit", daemon=True)
        self._stop_after_s, self._grace_s, self._end = stop_after_s, grace_s, end
        self._lifted, self._lock = threading.Event(), threading.Lock()
        self.start()

    def run(self) -> None:
        if self._lifted.wait(self._stop_after_s):
            return
        self._ask(signal.SIGUSR1, f"{self._stop_after_s:g} s are over: asked to save and end within {self._grace_s:g} s")
        if self._lifted.wait(self._grace_s):
            return
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # whose default would end this process without a record
            self._ask(signal.SIGTERM, f"it did not end within {self._grace_s:g} s")
            if self._lifted.wait(min(_LAST_WAIT_S, self._grace_s)):
                return
        with self._lock:
            if not self._lifted.is_set():
                self._end_process()  # the lock stays held: nobody gets past `lift`

    def _ask(self, number: signal.Signals, text: str) -> None:
        with self._lock:
            if not self._lifted.is_set():
                with contextlib.suppress(OSError):
                    os.write(2, f"echelon: {text}\n".encode())
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _end_process(self) -> None:
        with contextlib.suppress(OSError):
            self._end()
        with contextlib.suppress(OSError):
            os.write(2, (b"\x1b[?25h" if os.isatty(2) else b"") + b"echelon: stopped by force\n")
        kill_children()
        os._exit(REQUEUE)

    def lift(self) -> None:
        """The program has ended: no signal comes any more."""
        with self._lock:
            self._lifted.set()


class _Tee:
    """A stream that also writes to a log, and whose reader may go away; everything else is the terminal's own."""

    def __init__(self, stream: Any, log: Any) -> None:
        self._stream, self._log = stream, log

    def write(self, data: Any) -> int:
        with contextlib.suppress(ValueError):  # a logger that outlives the program and its log
            self._log.write(data)
            if isinstance(data, bytes):
                self._log.flush()
        with contextlib.suppress(OSError):  # `| head -1`, a terminal that has gone: the run continues, and its log has it all
            self._stream.write(data)
        return len(data)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> _Tee:
        return _Tee(self._stream.buffer, self._log.buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
