"""The agent of this node: starts its ranks, watches them, and restarts them as often as the job allows. See `NodeAgent.run`.

It loads torch through `launcher.local.rendezvous`, so `launcher.local.run` imports it inside a function.
"""

from __future__ import annotations

import enum
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from echelon.common import terminal
from echelon.contracts.rank import RankInfo
from echelon.contracts.stopping import REQUEUE
from echelon.diagnosis.failure import HANGS, Failure
from echelon.launcher.job import JobSpec
from echelon.launcher.local.attempt import Attempt, Requests
from echelon.launcher.local.end_record import HUNG
from echelon.launcher.local.gather import RankProbe
from echelon.launcher.local.hang import HangLimit, hang_timeout
from echelon.launcher.local.nodes import Meeting
from echelon.launcher.local.rank_state import RankState, has_handler
from echelon.launcher.local.rendezvous import NodesRendezvous, OneNodeRendezvous
from echelon.launcher.local.responder import HOW_FAR
from echelon.launcher.local.server import ForkServer
from echelon.launcher.local.shrink import Plan, loaders_of, next_ranks
from echelon.launcher.local.silence import NodeSilentError
from echelon.launcher.local.start import NOTHING, Handed, Start
from echelon.launcher.local.watch import Lingering, Watch, positions, stall_after
from echelon.launcher.local.worker import SLOW_MODULES, STACK_SIGNAL

__all__ = ["NodeAgent", "StopSignal"]

_LOOK_S = 0.01  # seconds between two looks at the ranks
# Time for a rank to react to SIGTERM once another has failed: it has nothing left to finish.
_FAILURE_GRACE_S = 5.0
_HUNG_GRACE_S = 0.5  # for a rank that has done nothing for minutes
_CULPRIT_WAIT_S = 2.0
_ANSWER_S = 1.0


class StopSignal(BaseException):
    """A signal has asked this launcher to stop. Not an Exception, so that no handler takes it for an error."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number = number


class _Ranks(enum.Enum):
    """The state of this node's ranks."""

    RUN = enum.auto()
    ENDED = enum.auto()  # ended well, on all nodes
    FAILED = enum.auto()


class NodeAgent:
    """Runs the ranks of one node through a `ForkServer`.

    Args:
        job: what to run.
        server: forks the ranks.
        begin_attempt: called with the number of each attempt; returns its folder, and descriptors for rank 0's output, if this
            node shows it.
        start_of: gives the description of a rank of an attempt; the rank's keys in the store begin with the third argument.
        requests: requests to stop and resume later; the ranks are asked, and may refuse.
        timeout_s: seconds after which `RankTimeoutError` is raised with the stacks of all ranks; None is no limit.
        meeting: with the agents of other nodes; None for one node.
        say: shows a line beside the ranks' own output.
    Attributes:
        restarts: number of restarts so far.
        plan: number of ranks of the present or coming attempt, and the reason.
        failures: of the latest failed attempt.
        cut_short: ranks were ended because others had left on request, or because the time limit was over.
        world_size: number of ranks of the attempt on all nodes.
        hang_s: seconds without progress after which the attempt was ended; None if it was not.
        seen: the states of the ranks when one failed, or when they were first asked to end.
        silent: why the ranks are to be ended, if another node has been silent for too long. Set by a thread.
    """

    silent = ""

    def __init__(
        self,
        job: JobSpec,
        server: ForkServer,
        begin_attempt: Callable[[int], tuple[Attempt, Handed]],
        start_of: Callable[[Attempt, RankInfo, str], Start],
        run_id: str,
        requests: Requests,
        timeout_s: float | None = None,
        meeting: Meeting | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._meetings = OneNodeRendezvous()
        if meeting is not None and meeting.nodes > 1:
            self._meetings = NodesRendezvous(meeting, comes_again=job.max_restarts > 0)
        self._node, self._nodes = (meeting.node, meeting.nodes) if meeting is not None else (0, 1)
        self._run_id = run_id
        self._job, self._server = job, server
        self._token = meeting.token if meeting is not None else secrets.token_hex(16)
        self._begin_attempt, self._start_of = begin_attempt, start_of
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        self._look_at_records_at = 0.0
        self._requests, self._passed_on = requests, 0
        self._leave_by: float | None = None
        self.attempt: Attempt | None = None
        self.failures: list[Failure] = []
        self.world_size = job.ranks
        self.plan = Plan(job.ranks, "")
        self.restarts, self.cut_short, self._gives_up = 0, False, False
        self.sight = RankProbe(self._signal)
        self.seen: dict[int, RankState] = {}
        self.hang_s: float | None = None
        self._say, stall_s = say or terminal.say, stall_after(job.stall_after_s)
        self._watch = Watch(stall_s, self._say, self.sight.ask_stacks)
        self._lingering = Lingering(stall_s)
        self._hang = HangLimit(*hang_timeout(job.hang_timeout_s), self._watch.progress, self.sight, stall_s)

    def run(self) -> bool:
        """Start the ranks and watch them, and restart them after failures, until they have ended well or for good.

        Returns:
            Whether they ended well. No rank is left, not even after an exception.
        Raises:
            StopSignal: a signal asked this launcher to stop.
            NodeSilentError: another node has been silent for too long.
            RankTimeoutError: the time limit is over.
            EchelonError: the ranks cannot meet, or those of another node have failed for good.
        """
        ends_by = signal.SIGTERM
        try:
            self._start()
            while True:
                time.sleep(_LOOK_S)
                state = self._look()
                if state is _Ranks.ENDED:
                    self._meetings.wait_for_others()
                    return True
                if state is _Ranks.RUN and not self._meetings.others_start_again():
                    continue
                self._end(signal.SIGTERM, min(_FAILURE_GRACE_S if self.hang_s is None else _HUNG_GRACE_S, self._job.grace_s))
                if state is _Ranks.FAILED and (self._gives_up or self.restarts >= self._job.max_restarts):
                    return False
                self._start()
        except StopSignal as stop:
            ends_by = stop.number
            raise
        finally:
            self._end_for_good(ends_by)

    def _start(self) -> None:
        """Start the ranks of the next attempt."""
        host, port = self._meetings.meet()
        self.restarts += self.attempt is not None
        self.attempt, outputs = self._begin_attempt(self.restarts)
        self.failures, self._gives_up = [], False
        self.sight.close()
        self.seen, self.hang_s = {}, None
        ranks = self.plan.ranks
        self.world_size = ranks * self._nodes
        try:
            for local_rank in range(ranks):
                info = RankInfo(
                    rank=self._node * ranks + local_rank,
                    local_rank=local_rank,
                    node_rank=self._node,
                    world_size=self.world_size,
                    local_world_size=ranks,
                    master_addr=host,
                    master_port=port,
                    restart_count=self.restarts,
                    run_id=self._run_id,
                )
                self._fork(self.attempt, info, outputs if info.rank == 0 else NOTHING)
        finally:
            for fd in (outputs.output, outputs.error, outputs.log):
                if fd is not None:
                    os.close(fd)
        if self.restarts == 0 and self._job.max_restarts > 0:
            # A restart need not wait for imports that each rank did at the first start.
            self._server.preload(SLOW_MODULES)

    def _fork(self, attempt: Attempt, info: RankInfo, outputs: Handed) -> None:
        start = self._start_of(attempt, info, f"{self._token}/{self.restarts}")
        with self.sight.responders.make(info.rank) as asked:
            handed = replace(outputs, pulse=self.sight.pulses.make(info.rank), asked=asked.fileno())
            attempt.pids[info.rank] = self._server.fork(start, handed)

    def _look(self) -> _Ranks:
        attempt = self._note_ends(0.0)
        if self.silent:
            self._gather(attempt)
            self._end(signal.SIGTERM, min(_HUNG_GRACE_S, self._job.grace_s))
            raise NodeSilentError(self.silent)
        looks = time.monotonic() > self._look_at_records_at
        if looks:
            self._look_at_records_at = time.monotonic() + self._hang.look_s
        self._see_to_requests(attempt, looks)
        if looks:
            self._watch.look(attempt.pids, attempt.running, self.sight.pulses)
        if (looks and attempt.stuck()) or any(attempt.failure(rank) for rank in attempt.ended):
            failures = self._hear_them_out()
            if (self.cut_short or attempt.left()) and all(f.is_victim for f in failures):
                attempt.expected_exits.update(f.rank for f in failures)  # they lost a peer that had left on request
                return _Ranks.RUN
            self.failures = failures
            self._plan_restart(attempt)
            return _Ranks.FAILED
        if looks and (idle_s := self._hangs(attempt)) is not None:
            self._blame_hung(attempt, idle_s)
            return _Ranks.FAILED
        if len(attempt.ended) == len(attempt.pids):
            return _Ranks.ENDED if self._meetings.all_done() else _Ranks.RUN
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise self.sight.timeout_error(attempt, self._timeout_s or 0.0)
        return _Ranks.RUN

    def _hangs(self, attempt: Attempt) -> float | None:
        idle_s = self._hang.look(attempt)
        for line in (self._hang.quiet(), self._hang.left(attempt), self._lingering.look(attempt)):
            if line is not None:
                self._say(line)
        # A node whose ranks have all ended learns of the others' end by itself.
        all_late = self._meetings.all_late(idle_s is not None or (self._hang.after_s > 0 and not attempt.running))
        return idle_s if all_late else None

    def _blame_hung(self, attempt: Attempt, idle_s: float) -> None:
        self.seen = self.sight.gather(attempt, self._hang.silent_s(), self._meetings.all_gathered)
        self.hang_s, now = idle_s, time.monotonic_ns()
        where = positions({rank: self.seen[rank] for rank in attempt.running}, attempt.running)
        headline = f"no rank made progress for {idle_s:.0f} s"
        own = {f.rank: f for f in attempt.failures()}  # a failed rank may wait in an atexit function
        self.failures = [
            own.get(rank) or Failure(rank, HUNG, now, HANGS, where, log=attempt.log_path(rank), headline=headline)
            for rank in attempt.running
        ]
        self._plan_restart(attempt)

    def _see_to_requests(self, attempt: Attempt, looks: bool) -> None:
        """Pass requests on to the ranks. Once one has left, or the time limit is over, the others have the grace time."""
        requests, now, grace_s = self._requests, time.monotonic(), self._job.grace_s
        if requests.time_is_up(now) and self._leave_by is None:
            self._leave_by = now + grace_s
            requests.add()
            terminal.say(f"{requests.stop_after_s:g} s are over: asked the ranks to save and end within {grace_s:g} s")
        if self._passed_on != requests.count:
            self._passed_on = requests.count
            for rank in attempt.running:
                self._server.signal(attempt.pids[rank], signal.SIGUSR1, group=False)
        if self._leave_by is None and attempt.left(records=looks):
            self._leave_by = now + grace_s
        if self._leave_by is not None and now > self._leave_by and attempt.running:
            self.cut_short = True
            terminal.say(f"rank {', '.join(map(str, attempt.running))} did not end within {grace_s:g} s and is stopped")
            late = attempt.running
            self._gather(attempt)
            self._end(signal.SIGTERM, min(_FAILURE_GRACE_S, grace_s))
            attempt.expected_exits.update(rank for rank, code in attempt.exit_codes().items() if rank in late and code < 0)

    def _plan_restart(self, attempt: Attempt) -> None:
        """Whether there is a next attempt, and with how many ranks."""
        if self._requests.count or attempt.left():
            self._gives_up = True  # a job that was asked to stop is not restarted
        elif self._job.min_ranks is not None and self.restarts < self._job.max_restarts:
            loaders = loaders_of(attempt.folder.parent)
            self.plan = next_ranks(len(attempt.pids), self._job.min_ranks, self.failures, loaders)
            self._gives_up = not self.plan.ranks

    def _hear_them_out(self) -> list[Failure]:
        """Wait for further failures: ranks fail within milliseconds of one another, and the first must be found by its time.

        If all failures so far are lost peers, wait longer for the peer.
        """
        until = time.monotonic() + _CULPRIT_WAIT_S
        while True:
            attempt = self._note_ends(0.05)
            failures = attempt.failures()
            if not all(f.is_victim for f in failures):
                return _name_stopped(failures, self._gather(attempt))
            if len(attempt.ended) == len(attempt.pids) or time.monotonic() > until:
                break
        self._gather(attempt)
        return failures

    @property
    def hang_limit_s(self) -> float:
        """Seconds; 0 is no limit."""
        return self._hang.after_s

    def moves(self) -> dict[tuple[str, int], object]:
        """Values that change as this node's ranks make progress. Called from any thread."""
        attempt = self.attempt
        if attempt is None:
            return {}
        running = [rank for rank in list(attempt.pids) if rank not in attempt.ended]
        answers = self.sight.responders.ask(running, HOW_FAR, _ANSWER_S)
        calls = {("calls", rank): answer.called for rank, answer in answers.items()}
        return {("attempt", attempt.number): len(running), **{("at", r): self.sight.pulses.read(r) for r in running}, **calls}

    def end_at_once(self) -> None:
        """End the ranks from any thread, if the main thread does not get to it."""
        self._server.kill()

    def _gather(self, attempt: Attempt) -> dict[int, RankState]:
        self.seen = self.sight.gather(attempt, self._hang.silent_s())
        return self.seen

    def _signal(self, rank: int, number: int) -> None:
        assert self.attempt is not None
        pid = self.attempt.pids[rank]
        if number != STACK_SIGNAL or has_handler(pid, number):  # otherwise it runs another program, which the signal would end
            self._server.signal(pid, number, group=False)

    def exit_code(self, otherwise: int) -> int:
        """75 if ranks left to be started again, else `otherwise`."""
        codes = set(self.attempt.exit_codes().values()) if self.attempt is not None else set()
        if otherwise == 0:
            return REQUEUE if self.cut_short or REQUEUE in codes else 0
        return REQUEUE if REQUEUE in codes and codes <= {0, REQUEUE} else otherwise

    def _note_ends(self, settle_s: float) -> Attempt:
        assert self.attempt is not None
        until = time.monotonic() + settle_s
        while True:
            exits = self._server.poll(max(0.0, until - time.monotonic()))
            for rank, pid in self.attempt.pids.items():
                if pid in exits and rank not in self.attempt.ended:
                    self.attempt.ended[rank], self.attempt.peaks[rank] = exits[pid], self._server.peaks.get(pid, 0)
                    self._server.forget(pid)
            if time.monotonic() >= until or len(self.attempt.ended) == len(self.attempt.pids):
                return self.attempt

    def _end_for_good(self, number: int) -> None:
        if self.attempt is not None and self.attempt.running and not self.seen:
            self._gather(self.attempt)  # a user who ends a run that seems to hang wants to know where it stood
        # After SIGHUP (a closed terminal) send SIGTERM, which programs of any kind handle.
        self._end(signal.SIGTERM if number == signal.SIGHUP else number, self._job.grace_s)
        self._meetings.close()

    def _end(self, number: int, grace_s: float) -> None:
        """Ask the running ranks to stop, and kill those that still run after the grace time.

        The request goes to the rank alone: to save, it may need its data workers and helpers.
        """
        if self.attempt is None:
            return
        if not self.seen:
            self.seen = self.sight.look(self.attempt, self._hang.silent_s())
        for sign, wait_s in ((number, grace_s), (signal.SIGKILL, 10.0)):
            for pid in [self.attempt.pids[rank] for rank in self.attempt.running]:
                self._server.signal(pid, sign, group=sign == signal.SIGKILL)
                if sign != signal.SIGKILL:
                    self._server.signal(pid, signal.SIGCONT)  # a stopped process must continue to get the first signal
            until = time.monotonic() + wait_s
            while len(self.attempt.ended) < len(self.attempt.pids) and time.monotonic() < until:
                self._note_ends(min(0.1, max(0.001, until - time.monotonic())))


def _name_stopped(failures: list[Failure], seen: Mapping[int, RankState]) -> list[Failure]:
    """Add the stopped ranks to the failures' messages."""
    stopped = [rank for rank, s in seen.items() if s.stopped]
    if not stopped:
        return failures
    hint = f"(rank {', '.join(map(str, stopped))} is stopped, as by SIGSTOP or a debugger)"
    return [replace(f, message=f"{f.message}\n{hint}") for f in failures]
