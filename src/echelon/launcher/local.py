"""Run a job on this machine: the elastic agent here, the ranks forked from a server that has torch loaded.

One rank without restarts runs in this very process instead, so that a debugger works.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from echelon.contracts.errors import EchelonError
from echelon.contracts.rank import RankInfo
from echelon.contracts.run_dir import RunDir, read_json, write_json
from echelon.launcher.failure import render
from echelon.launcher.job import Failure, JobSpec, Outcome, usable_cores
from echelon.launcher.relay import PlainScreen, Relay, Screen
from echelon.launcher.server import ForkServer
from echelon.launcher.worker import Start, run_program

__all__ = ["run_here", "run_local"]


def rank_environment(job: JobSpec, run: RunDir) -> dict[str, str]:
    """What every rank's environment holds apart from its rank."""
    env = {**os.environ, **run.to_env(), **job.env}
    # Two processes with two threads each are five times slower on two cores than with one: the threads wait for one another.
    env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // job.ranks)))
    # One machine: gloo need not resolve a host name, which fails in many containers, nor open a port to the network.
    if sys.platform == "linux" and Path("/sys/class/net/lo").exists():
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def run_local(
    job: JobSpec,
    run: RunDir,
    *,
    screen: Screen | None = None,
    server: ForkServer | None = None,
    start_fields: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> Outcome:
    """Run `job` on ranks of this machine until all have ended, restarting the group as often as the job allows.

    Args:
        run: the run folder; logs and records go to its attempts.
        screen: who shows rank 0's output; by default it goes to this process's own.
        server: forks the ranks; by default this process forks itself, which needs it to be single-threaded.
        start_fields: more fields of `worker.Start`, as `launch` of a function needs.
        timeout_s: raise `RankTimeoutError` with all stacks after so long.
    Returns:
        Exit code 0, or the first failing rank's with its failure; 128 + n when signal n stopped the job.
    """
    env = rank_environment(job, run)
    env["ECHELON_SCREEN"] = "launcher"  # rank 0 need not draw progress: the screen here does
    if server is None:  # this process becomes the server; libgomp reads the number when torch is imported, below
        os.environ.setdefault("OMP_NUM_THREADS", env["OMP_NUM_THREADS"])
    from torch.distributed.elastic.multiprocessing import SignalException

    from echelon.launcher.elastic import Attempt, ForkAgent, quiet_elastic_logs

    quiet_elastic_logs()
    own_server = server is None
    if server is None:
        server = ForkServer.fork_self()
    relay = Relay(screen or PlainScreen())
    first = run.attempt
    # `launch` needs the caller's whole path; a program has its own folder there, instead of the launcher's.
    sys_path = [p for p in sys.path if p] if job.kind == "call" else _path_without_launcher()

    def begin_attempt(number: int) -> tuple[Attempt, tuple[int, ...]]:
        here = run.at_attempt(first + number)
        run.attempt = here.attempt
        if number:
            _write_exit(agent, run.at_attempt(here.attempt - 1))
            sys.stderr.write(
                f"{render(Failure.first(agent.failures), job.ranks)}\nechelon: restart {number} of {job.max_restarts}\n"
            )
        return Attempt(here.attempt, here.attempt_path), relay.open(here.log(0))

    def fields(attempt: Attempt, info: RankInfo) -> dict[str, Any]:
        return {
            "kind": job.kind,
            "target": job.target,
            "args": list(job.args),
            "env": {**env, **RunDir(run.path, attempt.number).to_env()},
            "cwd": os.getcwd(),
            "sys_path": sys_path,
            "log": str(attempt.log_path(info.rank).absolute()),
            "record": str(attempt.record_path(info.rank).absolute()),
            "stacks": str(attempt.stacks_path(info.rank).absolute()) if timeout_s is not None else None,
            **{k: v(attempt, info) if callable(v) else v for k, v in (start_fields or {}).items()},
        }

    agent = ForkAgent(job, server, begin_attempt, fields, run.name, timeout_s)
    relay.start()
    try:
        with _signals_raise(SignalException, job.grace_s):
            result = agent.run()
        failure = Failure.first(agent.failures) if result.is_failed() else None
        outcome = Outcome(failure.exit_code if failure else 0, failure, agent.restarts)
    except SignalException as stop:
        outcome = Outcome(128 + int(stop.sigval), None, agent.restarts)
    except EchelonError as error:  # out of time, or the server was killed
        _write_exit(agent, run, stopped=str(error).partition("\n")[0])
        raise
    finally:
        relay.stop()
        if own_server:
            server.close()
    _write_exit(agent, run, outcome)
    return outcome


@contextlib.contextmanager
def _signals_raise(exception: type[Exception], grace_s: float) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises in the main thread, so that the agent stops its ranks; the next kills at once.

    One that is ignored stays so: `nohup` means what it says.
    """

    on_terminal = os.isatty(2)

    def kill(number: int, frame: FrameType | None) -> None:
        if on_terminal:
            os.write(2, b"\x1b[?25h")  # a live line hides the cursor
        os._exit(128 + number)  # the server notices our end and kills the ranks

    def stop(number: int, frame: FrameType | None) -> None:
        for heard in previous:
            signal.signal(heard, kill)
        name = signal.Signals(number).name
        text = f"echelon: {name}: asked the ranks to stop within {grace_s:g} s; once more kills them at once"
        with contextlib.suppress(OSError):  # descriptor 2 itself: a handler may interrupt a write to sys.stderr
            os.write(2, (f"\r\n{text}\r\n" if on_terminal else f"{text}\n").encode())
        raise exception(f"stopped by {name}", signal.Signals(number))

    previous: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, stop)
    except ValueError:  # not the main thread, as in a notebook's executor: whoever owns the main thread owns the signals
        pass
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _path_without_launcher() -> list[str]:
    """Where the launcher looks for modules, without the first place, which is its own folder or the one it was started in."""
    return [p for p in sys.path[0 if sys.flags.safe_path else 1 :] if p]


def _write_exit(agent: Any, run: RunDir, outcome: Outcome | None = None, stopped: str | None = None) -> None:
    """Record how an attempt ended."""
    failures: list[Failure] = agent.failures
    first = outcome.failure if outcome else (Failure.first(failures) if failures else None)
    ranks = {str(f.rank): f.as_json() for f in failures}
    write_json(
        run.exit_json,
        {
            "exit_code": outcome.exit_code if outcome else (first.exit_code if first else 1),
            "stopped": stopped,
            "first_failure": first.as_json() if first else None,
            "ranks": ranks,
            "ended": time.time(),
        },
    )


def run_here(job: JobSpec, run: RunDir) -> Outcome:
    """Run a job of one rank in this very process: `breakpoint()` and an interactive debugger work.

    Its output also goes to the rank's log.
    """
    info = RankInfo(rank=0, world_size=1, run_id=run.name)
    env = rank_environment(job, run)
    # Without a group to join, a world of one needs no address; scripts that insist on env:// find a free port.
    os.environ.update({**env, **info.to_env(), "MASTER_PORT": str(_free_port())})
    log, record = run.log(0), run.rank_exit(0)
    start = Start(
        job.kind,
        job.target,
        job.args,
        {},
        os.getcwd(),
        _path_without_launcher(),
        log=str(log.absolute()),
        record=str(record.absolute()),
    )
    pid = os.getpid()
    with open(log, "a", encoding="utf-8", errors="backslashreplace", buffering=1) as copy:
        out, err = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(out, copy), _Tee(err, copy)
        try:
            code = run_program(start)
            if os.getpid() != pid:  # a child that the program forked and that came back here
                sys.exit(code)
        finally:
            sys.stdout, sys.stderr = out, err
    failure = Failure.from_record(0, code, 0, read_json(record) or {}, log) if code else None
    outcome = Outcome(code, failure)
    write_json(
        run.exit_json,
        {
            "exit_code": code,
            "stopped": None,
            "first_failure": failure.as_json() if failure else None,
            "ranks": {"0": failure.as_json()} if failure else {},
            "ended": time.time(),
        },
    )
    return outcome


class _Tee:
    """A text stream that also writes to a log; everything else is the terminal's own."""

    def __init__(self, stream: Any, log: Any) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # a full disk; or a logger that outlives the program and its log
            self._log.write(text)
        return int(self._stream.write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
