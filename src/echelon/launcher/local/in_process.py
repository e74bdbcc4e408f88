"""Run a job of one rank in this very process, so that `breakpoint()` and an interactive debugger work.

Its output also goes to the rank's log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from echelon.contracts import pulse
from echelon.contracts.rank import RankInfo
from echelon.contracts.records import rank_record
from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE, SIGNALS
from echelon.diagnosis.failure import HANGS, Failure, render
from echelon.launcher.job import JobSpec, Outcome
from echelon.launcher.local import responder
from echelon.launcher.local.attempt import Attempt
from echelon.launcher.local.end_record import HUNG, record_end, write_exit
from echelon.launcher.local.gather import RankProbe
from echelon.launcher.local.hang import HangLimit, hang_timeout
from echelon.launcher.local.nodes import free_port
from echelon.launcher.local.output import output_to
from echelon.launcher.local.placement import bound
from echelon.launcher.local.processes import kill_children
from echelon.launcher.local.progress import Progress
from echelon.launcher.local.run import path_without_launcher, rank_environment
from echelon.launcher.local.start import Start
from echelon.launcher.local.worker import STACK_SIGNAL, end, run_program

__all__ = ["run_here"]

# Time for the program to react to SIGTERM, after the whole grace time.
_LAST_WAIT_S = 5.0


def run_here(job: JobSpec, run: RunDir) -> Outcome:
    """Run a job of one rank. Returns its exit code and failure; exit code 75 means that it ended to be started again later."""
    info = RankInfo(rank=0, world_size=1, run_id=run.name)
    env = rank_environment(job, run, os.environ, 1, restart=job.restart)
    # A world of one joins no group, so it needs no address; scripts that insist on env:// find a free port.
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
    hang = _HangLimit(run, hang_s) if given and hang_s else None
    with output_to(log) as copy:
        out, err = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(out, copy), _Tee(err, copy)
        try:
            code = run_program(start)
            if os.getpid() != pid:  # a child that the program forked returned to here
                end(code)
        finally:
            sys.stdout, sys.stderr = out, err
            with contextlib.suppress(OSError):  # paths of the run may be relative, and the program may have changed the folder
                os.chdir(folder)
    for each in (limit, hang):
        if each is not None:
            each.lift()
    for number, handler in before.items():
        signal.signal(number, handler)
    failure = Failure.from_record(0, code, 0, rank_record(record) or {}, log) if code not in (0, REQUEUE) else None
    record_end(run, code, [failure] if failure else [], world_size=1)
    return Outcome(code, failure)


class _Limit(threading.Thread):
    """A thread that may end this process until `lift` is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._lifted, self._lock = threading.Event(), threading.Lock()

    def _end_process(self, code: int, tell: Callable[[], None]) -> None:
        with self._lock:
            if not self._lifted.is_set():  # the lock stays held: nobody gets past `lift`
                with contextlib.suppress(OSError):
                    tell()
                kill_children()
                os._exit(code)

    def lift(self) -> None:
        """Call when the program has ended: from then on the thread neither signals nor ends this process."""
        with self._lock:
            self._lifted.set()


class _TimeLimit(_Limit):
    """After a time, ask this process to save and end as the launcher asks ranks: SIGUSR1, then SIGTERM, then an exit.

    Args:
        record: called before this process is ended by force.
    """

    def __init__(self, stop_after_s: float, grace_s: float, record: Callable[[], None]) -> None:
        super().__init__("echelon-time-limit")
        self._stop_after_s, self._grace_s, self._record = stop_after_s, grace_s, record
        self.start()

    def run(self) -> None:
        if self._lifted.wait(self._stop_after_s):
            return
        self._ask(signal.SIGUSR1, f"{self._stop_after_s:g} s are over: asked to save and end within {self._grace_s:g} s")
        if self._lifted.wait(self._grace_s):
            return
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # its default would end this process without a record
            self._ask(signal.SIGTERM, f"it did not end within {self._grace_s:g} s")
            if self._lifted.wait(min(_LAST_WAIT_S, self._grace_s)):
                return
        self._end_process(REQUEUE, self._tell)

    def _ask(self, number: signal.Signals, text: str) -> None:
        with self._lock:
            if not self._lifted.is_set():
                with contextlib.suppress(OSError):
                    os.write(2, f"echelon: {text}\n".encode())
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _tell(self) -> None:
        with contextlib.suppress(OSError):
            self._record()
        _write("echelon: stopped by force")


class _HangLimit(_Limit):
    """Ends this process when it makes no progress for too long, with evidence in the run's folder.

    Only with a limit from the user: a single rank waits for no other, and may be in a debugger. The thread needs the GIL now and
    then, so it cannot end C code that holds the GIL.
    """

    def __init__(self, run: RunDir, after_s: float) -> None:
        super().__init__("echelon-hang-timeout")
        self._run = RunDir(run.path.absolute(), run.attempt)  # the program may change its working folder
        self._sight = RankProbe(lambda rank, number: os.kill(os.getpid(), number))
        shared = self._sight.pulses.make(0)
        pulse.join(shared)
        faulthandler.register(STACK_SIGNAL, file=shared, all_threads=True)
        responder.begin(self._sight.responders.make(0).detach(), str(self._run.flight(0)))
        self._attempt = Attempt(run.attempt, self._run.attempt_path)
        self._attempt.pids = {0: os.getpid()}
        self._progress = Progress()
        self._limit = HangLimit(after_s, True, self._progress, self._sight, after_s)
        self.start()

    def run(self) -> None:
        while not self._lifted.wait(self._limit.look_s):
            self._progress.look(self._attempt.pids, [0], self._sight.pulses)
            idle_s = self._limit.look(self._attempt)
            if idle_s is not None:
                self._end_process(HUNG, functools.partial(self._tell, idle_s))

    def _tell(self, idle_s: float) -> None:
        seen = self._sight.gather(self._attempt, self._limit.silent_s())
        headline = f"rank 0 made no progress for {idle_s:.0f} s"
        failure = Failure(0, HUNG, 0, HANGS, log=self._run.log(0), headline=headline)
        named = record_end(self._run, HUNG, [failure], seen=seen, hang_s=idle_s, world_size=1)
        _write(render(named or failure, 1))

    def lift(self) -> None:
        super().lift()
        self.join()
        faulthandler.unregister(STACK_SIGNAL)
        self._sight.close()


def _write(text: str) -> None:
    """Write to descriptor 2 directly, and show the cursor again, which a progress line may have hidden."""
    os.write(2, (b"\x1b[?25h" if os.isatty(2) else b"") + f"{text}\n".encode(errors="replace"))


class _Tee:
    """A stream that also writes to a log, and that survives the loss of its reader. Other attributes are the stream's own."""

    def __init__(self, stream: Any, log: Any) -> None:
        self._stream, self._log = stream, log

    def write(self, data: Any) -> int:
        with contextlib.suppress(ValueError):  # a logger may outlive the program and its log
            self._log.write(data)
            if isinstance(data, bytes):
                self._log.flush()
        with contextlib.suppress(OSError):  # `| head -1`, a closed terminal: the run continues, and its log has all output
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
