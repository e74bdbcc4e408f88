"""Run a job of one rank in this very process, so that `breakpoint()` and an interactive debugger work.

Its output also goes to the rank's log. Nothing watches such a rank: one with a time limit, a hang limit or restarts is forked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

from echelon.contracts.rank import RankInfo
from echelon.contracts.records import rank_record
from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE, SIGNALS
from echelon.diagnosis.failure import Failure
from echelon.launcher.job import JobSpec, Outcome
from echelon.launcher.local.end_record import record_end
from echelon.launcher.local.nodes import free_port
from echelon.launcher.local.output import output_to
from echelon.launcher.local.placement import bound
from echelon.launcher.local.run import path_without_launcher, rank_environment
from echelon.launcher.local.start import Start
from echelon.launcher.local.worker import end, run_program

__all__ = ["run_here"]


def run_here(job: JobSpec, run: RunDir) -> Outcome:
    """Run a job of one rank. Returns its exit code and failure; exit code 75 means that it ended to be started again later."""
    info = RankInfo(rank=0, world_size=1, run_id=run.name)
    env = rank_environment(job, run, os.environ, 1, restart=job.restart)
    # A world of one joins no group, so it needs no address; scripts that insist on env:// find a free port.
    _, place = bound(0, 1, {**os.environ, **job.env}, devices=job.own_device)
    os.environ.update({**env, **place, **info.to_env(), "MASTER_PORT": str(free_port())})
    log, record = run.log(0), run.rank_exit(0)
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
    for number, handler in before.items():
        signal.signal(number, handler)
    failure = Failure.from_record(0, code, 0, rank_record(record) or {}, log) if code not in (0, REQUEUE) else None
    record_end(run, code, [failure] if failure else [], world_size=1)
    return Outcome(code, failure)


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
