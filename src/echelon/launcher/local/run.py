"""Run a job on this machine: the agent runs here, and the ranks are forked from a server that has torch loaded.

One rank without restarts and limits runs in this very process instead: `launcher.local.in_process`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FrameType
from typing import Any

from echelon.common import terminal
from echelon.common.errors import EchelonError
from echelon.common.files import private_folder, working_folder
from echelon.common.machine import usable_cores, visible_devices
from echelon.contracts.rank import STORE_PREFIX_VARIABLE, RankInfo
from echelon.contracts.restart_notes import RESTART_VARIABLE, has_begun
from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE, handling
from echelon.diagnosis import nccl_dump
from echelon.diagnosis.failure import Failure, render
from echelon.launcher.job import JobSpec, Outcome
from echelon.launcher.local.alone import never_met
from echelon.launcher.local.attempt import Attempt, Requests
from echelon.launcher.local.end_record import record_end, write_exit
from echelon.launcher.local.nodes import Meeting
from echelon.launcher.local.placement import bound, interfaces
from echelon.launcher.local.relay import PlainScreen, Relay, Screen
from echelon.launcher.local.server import ForkServer, load
from echelon.launcher.local.silence import NodeSilentError, Silence
from echelon.launcher.local.start import NOTHING, CallFile, Handed, Start

__all__ = ["path_without_launcher", "rank_environment", "run_local"]

_DESCRIPTORS = 1 << 16
_OWN, _OF_A_RANK, _OF_A_CONNECTION = 26, 2, 1  # fewest descriptors that the launcher holds


def rank_environment(
    job: JobSpec, run: RunDir, given: Mapping[str, str], ranks: int, *, restart: bool, meeting: Meeting | None = None
) -> dict[str, str]:
    """The part of the environment that all ranks share.

    Args:
        given: this process's environment, as the user gave it.
        ranks: number of ranks of this attempt on this node.
        restart: this attempt starts over.
        meeting: with other nodes; None for one node.
    """
    env = {**given, **run.to_env(), **job.env}
    env.pop(RESTART_VARIABLE, None)
    if restart:
        env[RESTART_VARIABLE] = "1"
    # Two processes with two threads each are five times slower on two cores than with one thread each: the threads wait for each
    # other.
    env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    if visible_devices(env):
        private_folder(run.dumps)
        private_folder(run.dump_path)
        for name, value in nccl_dump.environment(run.dump_path).items():
            env.setdefault(name, value)
    for name, value in interfaces(meeting.interface if meeting is not None and meeting.nodes > 1 else None).items():
        env.setdefault(name, value)
    return env


def run_local(
    job: JobSpec,
    run: RunDir,
    *,
    screen: Screen | None = None,
    server: ForkServer | None = None,
    call: CallFile | None = None,
    timeout_s: float | None = None,
    meeting: Meeting | None = None,
) -> Outcome:
    """Run `job` on ranks of this machine until all have ended, restarting all ranks as often as the job allows.

    Args:
        run: the run folder; logs and records go to its attempts.
        screen: shows rank 0's output; by default it goes to this process's own.
        server: forks the ranks; by default this process forks itself, for which it must be single-threaded.
        call: for a job that is a function.
        timeout_s: seconds after which `RankTimeoutError` is raised, with all stacks.
        meeting: with the launchers of other nodes, each of which runs `job.ranks` ranks; None for one node.
    Returns:
        Exit code 0, or the first failing rank's with its failure; 75 when ranks ended to be started again later; 128 + n when
        signal n stopped the job.
    """
    requests = Requests(job.stop_after_s)
    given = dict(os.environ)
    if screen is not None or not terminal.is_terminal(
        sys.stderr
    ):  # otherwise rank 0 writes its progress itself, as a single process would
        given["ECHELON_SCREEN"] = "launcher"
    with _sigusr1_asks(requests):
        if server is None:  # this process becomes the server; libgomp reads the variable when torch is imported below
            threads = rank_environment(job, run, given, job.ranks, restart=False)["OMP_NUM_THREADS"]
            os.environ.setdefault("OMP_NUM_THREADS", threads)
            load(["echelon.launcher.local.agent"])
        from echelon.launcher.local.agent import NodeAgent

        own = contextlib.closing(ForkServer.fork_self()) if server is None else contextlib.nullcontext(server)
        with own as forks, _many_descriptors(nodes=meeting.nodes if meeting is not None else 1, ranks=job.ranks):
            relay = Relay(screen or PlainScreen())
            starts = _Starts(job, run, given, meeting, call, relay)
            starts.agent = NodeAgent(job, forks, starts.begin, starts.start_of, run.name, requests, timeout_s, meeting, relay.say)
            relay.start()
            if meeting is not None and meeting.nodes > 1:
                starts.silence = Silence(meeting, terminal.say, starts.agent, starts.record_silence)
                starts.silence.start()
            try:
                outcome = _until_ended(starts)
            finally:
                if starts.silence is not None:
                    starts.silence.close()
                starts.agent.sight.close()
                relay.stop()
        alone = never_met(starts.agent.attempt, range(job.ranks)) if meeting is None else ""
        outcome = replace(outcome, note="; ".join(note for note in (outcome.note, alone) if note))
        first = starts.record(run, outcome.exit_code, starts.agent.failures if outcome.failure is not None else [])
        return replace(outcome, failure=first, exit_code=first.exit_code) if first is not None else outcome


@contextlib.contextmanager
def _many_descriptors(nodes: int, ranks: int) -> Iterator[None]:
    """Raise the limit of open files: every connection to the store's port holds one, even an idle one.

    The ranks keep the user's own limit, since their server was started before.

    Raises:
        EchelonError: the hard limit is too low for so many ranks on each node; some would wait minutes for a connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    needed = _OWN + _OF_A_RANK * ranks + _OF_A_CONNECTION * ranks * nodes
    if wanted < needed:
        raise EchelonError(
            f"the launcher must be allowed {needed} open files for {ranks} ranks{f' on each of {nodes} nodes' * (nodes > 1)}, "
            f"got {hard}. Raise the hard limit (`ulimit -Hn`), or start fewer ranks."
        )
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        yield
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _until_ended(starts: _Starts) -> Outcome:
    from echelon.launcher.local.agent import StopSignal

    agent = starts.agent
    try:
        with _signals_raise(StopSignal, starts.job.grace_s, patient=starts.meeting is not None):
            ended_well = agent.run()
    except StopSignal as stop:
        return Outcome(agent.exit_code(128 + stop.number), None, agent.restarts)
    except NodeSilentError as error:
        starts.record_silence(str(error))
        raise
    except EchelonError as error:  # the time limit is over, or the server was killed
        starts.record(starts.run, 1, agent.failures, str(error).partition("\n")[0])
        raise
    failure = None if ended_well else Failure.first(agent.failures)
    note = "" if agent.plan.ranks else f"not started again: {agent.plan.why}"
    return Outcome(failure.exit_code if failure else agent.exit_code(0), failure, agent.restarts, note)


class _Starts:
    """Every start of a job's ranks: its folder, and each rank's description.

    Args:
        run: set to the newest attempt.
        given: the environment, as the user gave it.
        call: for a job that is a function.
    Attributes:
        agent: the agent that starts the ranks.
        silence: watches other nodes, if there are any.
    """

    agent: Any
    silence: Silence | None = None

    def __init__(
        self,
        job: JobSpec,
        run: RunDir,
        given: Mapping[str, str],
        meeting: Meeting | None,
        call: CallFile | None,
        relay: Relay,
    ) -> None:
        self.job, self.run, self.meeting, self.relay = job, run, meeting, relay
        self._given, self._call, self._first = given, call, run.attempt
        # `launch` needs the caller's whole path; a program has its own folder in place of the launcher's.
        self._sys_path = [p for p in sys.path if p] if job.kind == "call" else path_without_launcher()

    def begin(self, number: int) -> tuple[Attempt, Handed]:
        attempt_dir = self.run.at_attempt(self._first + number)
        self.run.attempt = attempt_dir.attempt
        if number:
            self._end_before(attempt_dir, number)
        shown = self.meeting is None or self.meeting.node == 0
        return Attempt(attempt_dir.attempt, attempt_dir.attempt_path), self.relay.open(attempt_dir.log(0)) if shown else NOTHING

    def _end_before(self, attempt_dir: RunDir, number: int) -> None:
        """Write the record of the previous start, which failed, and print why there is another one."""
        failures, plan = self.agent.failures, self.agent.plan
        first = self.record(attempt_dir.at_attempt(attempt_dir.attempt - 1), 1, failures)
        before = render(first, self.job.ranks) if first else "echelon: ranks of another node failed"
        how = f" with {plan.ranks} ranks: {plan.why}" if plan.why else ""
        with contextlib.suppress(OSError):  # the terminal may be closed
            sys.stderr.write(f"{before}\nechelon: restart {number} of {self.job.max_restarts}{how}\n")

    def record(self, attempt_dir: RunDir, code: int, failures: Sequence[Failure], stopped: str | None = None) -> Failure | None:
        """Record how the attempt ended on this node; returns the failure that the others follow from.

        Args:
            code: the exit code if no rank failed.
        """
        agent, at = self.agent, self.meeting
        hang_s, ranks = agent.hang_s, agent.world_size
        if at is None or at.nodes == 1:
            return record_end(attempt_dir, code, failures, stopped, seen=agent.seen, hang_s=hang_s, world_size=ranks)
        first = Failure.first(failures) if failures else None  # the guilty rank may be on another node: `finish_job` decides
        code = first.exit_code if first is not None else code
        silent = self.silence.words() if self.silence is not None else ""
        if silent and failures and all(f.is_victim for f in failures):  # the ranks gave up before the launcher
            code, stopped = REQUEUE, silent
        write_exit(at.exit_path(attempt_dir), code, failures, first, stopped, seen=agent.seen, hang_s=hang_s, world_size=ranks)
        return first

    def record_silence(self, why: str) -> None:
        """Record that the attempt ended because another node is silent, and that a restart is worthwhile. From any thread."""
        agent = self.agent
        if not agent.seen and agent.attempt is not None:
            with contextlib.suppress(Exception):  # the main thread may be gathering evidence, too
                agent.seen = agent.sight.gather(agent.attempt, {})
        self.record(self.run, REQUEUE, [], why)

    def start_of(self, attempt: Attempt, info: RankInfo, store_prefix: str) -> Start:
        """The description of a rank of an attempt."""
        attempt_dir = RunDir(self.run.path, attempt.number)
        # Restart until an attempt has set the old progress aside: after one that died before that, the next would resume from it.
        earlier = (RunDir(attempt_dir.path, n).attempt_path for n in range(self._first, attempt.number))
        restart = self.job.restart and not any(map(has_begun, earlier))
        ranks, job, call = info.local_world_size, self.job, self._call
        cores, place = bound(info.local_rank, ranks, {**self._given, **job.env}, cores=job.bind, devices=job.own_device)
        env = {
            **rank_environment(job, attempt_dir, self._given, ranks, restart=restart, meeting=self.meeting),
            **place,
            **info.to_env(),
            # With this, torch's env:// joins the store that the agent serves, instead of serving one from rank 0.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            STORE_PREFIX_VARIABLE: store_prefix,
        }
        return Start(
            job.kind,
            job.target,
            list(job.args),
            env,
            working_folder(),
            self._sys_path,
            log=str(attempt.log_path(info.rank).absolute()),
            record=str(attempt.record_path(info.rank).absolute()),
            result=str(attempt.folder.absolute() / f"value.rank{info.rank}.pkl") if call is not None else None,
            flight=str(attempt_dir.flight(info.rank).absolute()),
            cores=cores,
            code=job.code,
            sha256=call.sha256 if call is not None else None,
            task=call.task if call is not None else 0,
            key=call.key if call is not None else "",
        )


def _signals_raise(
    exception: Callable[[signal.Signals], BaseException], grace_s: float, *, patient: bool
) -> AbstractContextManager[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises in the main thread, so that the agent stops its ranks; the next kills at once.

    With `patient`, further signals do nothing: a batch system sends several at once, and itself sends SIGKILL when its grace time
    is over.
    """

    on_terminal, asking = os.isatty(2), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def kill(number: int, frame: FrameType | None) -> None:
        if on_terminal:
            os.write(2, b"\x1b[?25h")  # a progress line hides the cursor
        os._exit(128 + number)  # the server notices our end and kills the ranks

    def stop(number: int, frame: FrameType | None) -> None:
        for each in asking:
            if signal.getsignal(each) is stop:
                signal.signal(each, signal.SIG_IGN if patient else kill)
        more = "" if patient else "; once more kills them at once"
        _write_now(f"{signal.Signals(number).name}: asked the ranks to stop within {grace_s:g} s{more}")
        raise exception(signal.Signals(number))

    return handling(dict.fromkeys(asking, stop))


def _write_now(text: str) -> None:
    """Write from a signal handler: to descriptor 2 directly, since the signal may interrupt a write to sys.stderr."""
    with contextlib.suppress(OSError):
        os.write(2, (f"\r\nechelon: {text}\r\n" if os.isatty(2) else f"echelon: {text}\n").encode())


@contextlib.contextmanager
def _sigusr1_asks(requests: Requests) -> Iterator[None]:
    """Pass SIGUSR1 on to the ranks from the start; this process continues."""

    def ask(number: int, frame: FrameType | None) -> None:
        requests.add()
        _write_now("SIGUSR1: asked the ranks to save and end")

    with handling({signal.SIGUSR1: ask}):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # the parent process may have blocked it
        yield


def path_without_launcher() -> list[str]:
    """The launcher's module search path without its first entry, the launcher's own folder or working folder."""
    return [p for p in sys.path[0 if sys.flags.safe_path else 1 :] if p]
