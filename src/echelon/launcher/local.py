"""Run a job on this machine: the elastic agent here, the ranks forked from a server that has torch loaded.

One rank without restarts runs in this very process instead: `launcher.here`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from echelon.contracts.errors import EchelonError
from echelon.contracts.machine import usable_cores
from echelon.contracts.rank import RankInfo
from echelon.contracts.run_dir import RESTART_VARIABLE, RunDir, has_begun, write_json
from echelon.launcher.attempt import Attempt, Requests
from echelon.launcher.failure import render
from echelon.launcher.job import Failure, JobSpec, Outcome
from echelon.launcher.nodes import Meeting
from echelon.launcher.placement import bound, interfaces
from echelon.launcher.relay import PlainScreen, Relay, Screen
from echelon.launcher.server import ForkServer

__all__ = ["path_without_launcher", "rank_environment", "run_local"]


def rank_environment(
    job: JobSpec, run: RunDir, given: Mapping[str, str], ranks: int, *, restart: bool, meeting: Meeting | None = None
) -> dict[str, str]:
    """What every rank's environment holds apart from its rank.

    Args:
        given: this process's own, as the user gave it.
        ranks: how many there are this time on this node.
        restart: this attempt begins anew.
        meeting: with other nodes; None is one node.
    """
    env = {**given, **run.to_env(), **job.env}
    env.pop(RESTART_VARIABLE, None)
    if restart:
        env[RESTART_VARIABLE] = "1"
    # Two processes with two threads each are five times slower on two cores than with one: the threads wait for one another.
    env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    for name, value in interfaces(meeting.interface if meeting is not None and meeting.nodes > 1 else None).items():
        env.setdefault(name, value)
    return env


def run_local(
    job: JobSpec,
    run: RunDir,
    *,
    screen: Screen | None = None,
    server: ForkServer | None = None,
    start_fields: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    meeting: Meeting | None = None,
) -> Outcome:
    """Run `job` on ranks of this machine until all have ended, restarting the group as often as the job allows.

    Args:
        run: the run folder; logs and records go to its attempts.
        screen: who shows rank 0's output; by default it goes to this process's own.
        server: forks the ranks; by default this process forks itself, which needs it to be single-threaded.
        start_fields: more fields of `worker.Start`, as `launch` of a function needs.
        timeout_s: raise `RankTimeoutError` with all stacks after so long.
        meeting: with the launchers of other nodes, each of which runs `job.ranks` ranks; None is one node.
    Returns:
        Exit code 0, or the first failing rank's with its failure; 75 when ranks ended to be started again later; 128 + n when
        signal n stopped the job.
    """
    requests = Requests(job.stop_after_s)
    with _sigusr1_asks(requests):
        return _run(job, run, requests, screen, server, start_fields or {}, timeout_s, meeting)


def _run(
    job: JobSpec,
    run: RunDir,
    requests: Requests,
    screen: Screen | None,
    server: ForkServer | None,
    start_fields: Mapping[str, Any],
    timeout_s: float | None,
    meeting: Meeting | None,
) -> Outcome:
    given = {**os.environ, "ECHELON_SCREEN": "launcher"}  # rank 0 need not draw progress: the screen here does
    if server is None:  # this process becomes the server; libgomp reads the number when torch is imported, below
        os.environ.setdefault("OMP_NUM_THREADS", rank_environment(job, run, given, job.ranks, restart=False)["OMP_NUM_THREADS"])
    from torch.distributed.elastic.multiprocessing import SignalException

    from echelon.launcher.elastic import ForkAgent, quiet_elastic_logs

    quiet_elastic_logs()
    own_server = server is None
    if server is None:
        server = ForkServer.fork_self()
    relay = Relay(screen or PlainScreen())
    first = run.attempt
    # `launch` needs the caller's whole path; a program has its own folder there, instead of the launcher's.
    sys_path = [p for p in sys.path if p] if job.kind == "call" else path_without_launcher()

    def begin_attempt(number: int) -> tuple[Attempt, tuple[int, ...]]:
        here = run.at_attempt(first + number)
        run.attempt = here.attempt
        if number:
            _write_exit(agent, run.at_attempt(here.attempt - 1), meeting)
            plan = agent.plan
            how = f" with {plan.ranks} ranks: {plan.why}" if plan.why else ""
            before = (
                render(Failure.first(agent.failures), job.ranks) if agent.failures else "echelon: ranks of another node failed"
            )
            sys.stderr.write(f"{before}\nechelon: restart {number} of {job.max_restarts}{how}\n")
        return Attempt(here.attempt, here.attempt_path), relay.open(here.log(0)) if not meeting or meeting.node == 0 else ()

    def fields(attempt: Attempt, info: RankInfo) -> dict[str, Any]:
        return {
            "kind": job.kind,
            "target": job.target,
            "args": list(job.args),
            "env": {**env_of(attempt, info.local_world_size), **place_of(info)[1]},
            "cwd": os.getcwd(),
            "code": job.code,
            "sys_path": sys_path,
            "log": str(attempt.log_path(info.rank).absolute()),
            "record": str(attempt.record_path(info.rank).absolute()),
            "stacks": str(attempt.stacks_path(info.rank).absolute()) if timeout_s is not None else None,
            "cores": place_of(info)[0],
            **{k: v(attempt, info) if callable(v) else v for k, v in start_fields.items()},
        }

    def place_of(info: RankInfo) -> tuple[list[int], dict[str, str]]:
        return bound(info.local_rank, info.local_world_size, {**given, **job.env}, cores=job.bind, devices=job.own_device)

    def env_of(attempt: Attempt, ranks: int) -> dict[str, str]:
        here = RunDir(run.path, attempt.number)
        # Until an attempt has set aside what was there: one that died before would else go on from it.
        restart = job.restart and not any(has_begun(RunDir(run.path, n).attempt_path) for n in range(first, attempt.number))
        return rank_environment(job, here, given, ranks, restart=restart, meeting=meeting)

    agent = ForkAgent(job, server, begin_attempt, fields, run.name, requests, timeout_s, meeting)
    relay.start()
    try:
        with _signals_raise(SignalException, job.grace_s, patient=meeting is not None):
            result = agent.run()
        failure = Failure.first(agent.failures) if result.is_failed() else None
        note = "" if agent.plan.ranks else f"not started again: {agent.plan.why}"
        outcome = Outcome(failure.exit_code if failure else agent.exit_code(0), failure, agent.restarts, note)
    except SignalException as stop:
        outcome = Outcome(agent.exit_code(128 + int(stop.sigval)), None, agent.restarts)
    except EchelonError as error:  # out of time, or the server was killed
        _write_exit(agent, run, meeting, stopped=str(error).partition("\n")[0])
        raise
    finally:
        relay.stop()
        if own_server:
            server.close()
    _write_exit(agent, run, meeting, outcome)
    return outcome


@contextlib.contextmanager
def _signals_raise(exception: type[Exception], grace_s: float, *, patient: bool) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises in the main thread, so that the agent stops its ranks; the next kills at once.

    One that is ignored stays so: `nohup` means what it says. With `patient`, the next does nothing: a batch system sends
    several at once, and is not to be hindered from killing by SIGKILL when its patience is over.
    """

    on_terminal = os.isatty(2)

    def kill(number: int, frame: FrameType | None) -> None:
        if on_terminal:
            os.write(2, b"\x1b[?25h")  # a live line hides the cursor
        os._exit(128 + number)  # the server notices our end and kills the ranks

    def stop(number: int, frame: FrameType | None) -> None:
        for heard in previous:
            signal.signal(heard, signal.SIG_IGN if patient else kill)
        more = "" if patient else "; once more kills them at once"
        _write_now(f"{signal.Signals(number).name}: asked the ranks to stop within {grace_s:g} s{more}")
        raise exception(f"stopped by {signal.Signals(number).name}", signal.Signals(number))

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


def _write_now(text: str) -> None:
    """For a handler of signals: to descriptor 2 itself, since it may interrupt a write to sys.stderr."""
    with contextlib.suppress(OSError):
        os.write(2, (f"\r\nechelon: {text}\r\n" if os.isatty(2) else f"echelon: {text}\n").encode())


@contextlib.contextmanager
def _sigusr1_asks(requests: Requests) -> Iterator[None]:
    """SIGUSR1 is passed on to the ranks, from the first moment; this process itself goes on."""

    def ask(number: int, frame: FrameType | None) -> None:
        requests.add()
        _write_now("SIGUSR1: asked the ranks to save and end")

    previous: Any = signal.SIG_IGN
    with contextlib.suppress(ValueError):  # not the main thread: whoever owns it owns the signals
        if signal.getsignal(signal.SIGUSR1) != signal.SIG_IGN:
            previous = signal.signal(signal.SIGUSR1, ask)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # whoever started early may have held it back
    try:
        yield
    finally:
        if previous != signal.SIG_IGN:
            signal.signal(signal.SIGUSR1, previous)


def path_without_launcher() -> list[str]:
    """Where the launcher looks for modules, without the first place, which is its own folder or the one it was started in."""
    return [p for p in sys.path[0 if sys.flags.safe_path else 1 :] if p]


def _write_exit(
    agent: Any, run: RunDir, meeting: Meeting | None, outcome: Outcome | None = None, stopped: str | None = None
) -> None:
    """Record how an attempt ended: for all, or with several nodes for this one."""
    failures: list[Failure] = agent.failures
    first = outcome.failure if outcome else (Failure.first(failures) if failures else None)
    ranks = {str(f.rank): f.as_json() for f in failures}
    path = run.node_exit(meeting.node) if meeting is not None and meeting.nodes > 1 else run.exit_json
    write_json(
        path,
        {
            "exit_code": outcome.exit_code if outcome else (first.exit_code if first else 1),
            "stopped": stopped,
            "first_failure": first.as_json() if first else None,
            "ranks": ranks,
            "ended": time.time(),
        },
    )
