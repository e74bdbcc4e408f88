"""The elastic agent of this machine: torchelastic's agent over ranks that are forked instead of started.

torchelastic documents `SimpleElasticAgent` as the class to extend, by four methods with a leading underscore; they and
`_remaining_restarts` are all that is used of it (tests/launcher/test_elastic_seam.py notices a change; tested with torch 2.13.0).
It keeps the decisions (ranks, restarts, when a group is done); ours are how a rank starts, stops and is heard to end.

With `launcher.local.rendezvous` the only module of this room that imports torch at its top; `launcher.local.run` imports it
inside a function.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.agent.server import SimpleElasticAgent, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from echelon.common import terminal
from echelon.contracts.rank import STORE_PREFIX_VARIABLE, RankInfo
from echelon.contracts.stopping import REQUEUE
from echelon.launcher.job import Failure, JobSpec
from echelon.launcher.local.attempt import Attempt, Requests
from echelon.launcher.local.companion import HOW_FAR
from echelon.launcher.local.gather import RankProbe
from echelon.launcher.local.hang import HangLimit, hang_timeout
from echelon.launcher.local.judge import HANGS, HUNG
from echelon.launcher.local.nodes import Meeting
from echelon.launcher.local.rank_state import RankState, has_handler
from echelon.launcher.local.rendezvous import NODES_WAIT_S, NodesRendezvous, OneNodeRendezvous
from echelon.launcher.local.server import ForkServer
from echelon.launcher.local.shrink import Plan, loaders_of, next_ranks
from echelon.launcher.local.silence import NodeSilentError
from echelon.launcher.local.watch import Watch, positions, stall_after
from echelon.launcher.local.worker import STACK_SIGNAL

__all__ = ["ForkAgent"]

# How long a rank may take to react to SIGTERM once another has failed: it has nothing left to finish.
_FAILURE_GRACE_S = 5.0
_HUNG_GRACE_S = 0.5  # for a rank that has done nothing for minutes
_CULPRIT_WAIT_S = 2.0
_ANSWER_S = 1.0


class ForkAgent(SimpleElasticAgent):
    """Runs the ranks of one node through a `ForkServer`.

    Args:
        job: what to run.
        server: forks the ranks.
        begin_attempt: called with the number of each attempt; returns its folder and, for rank 0, the two descriptors
            that become its standard output and error.
        start_fields: the fields of `worker.Start` for a rank, without the rank's own variables.
        requests: to stop and resume later; the ranks are asked, and may refuse.
        timeout_s: after so long the stacks of all ranks are collected and `RankTimeoutError` is raised; None never does.
        meeting: with the agents of other nodes; None is alone.
        say: shows a line beside the ranks' own output.
    Attributes:
        restarts: how many there were.
        plan: how many ranks the present or coming attempt has, and why.
        failures: of the latest failed attempt.
        cut_short: ranks were ended because others had left, or because the time was up.
        world_size: how many ranks the attempt has on all nodes.
        hang_s: the attempt was ended since nothing had moved for so long; None if it was not.
        seen: how far the ranks had come when one failed, or they were first asked to end.
        silent: nothing has been heard of another node for too long, in words: the ranks are to be ended. Set by a thread.
    """

    silent = ""

    def __init__(
        self,
        job: JobSpec,
        server: ForkServer,
        begin_attempt: Callable[[int], tuple[Attempt, tuple[int, ...]]],
        start_fields: Callable[[Attempt, RankInfo], Mapping[str, Any]],
        run_id: str,
        requests: Requests,
        timeout_s: float | None = None,
        meeting: Meeting | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._meetings = OneNodeRendezvous(run_id)
        if meeting is not None and meeting.nodes > 1:
            self._meetings = NodesRendezvous(run_id, meeting, comes_again=job.max_restarts > 0)
        spec = WorkerSpec(
            role="default",
            local_world_size=job.ranks,
            rdzv_handler=self._meetings,
            entrypoint=job.target,
            max_restarts=job.max_restarts,
            monitor_interval=0.01,
        )
        super().__init__(spec, exit_barrier_timeout=NODES_WAIT_S)
        self._job, self._server = job, server
        self._token = meeting.token if meeting is not None else secrets.token_hex(16)
        self._begin_attempt, self._start_fields = begin_attempt, start_fields
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        self._look_at_records_at = 0.0
        self._requests, self._passed_on = requests, 0
        self._leave_by: float | None = None
        self.attempt: Attempt | None = None
        self.failures: list[Failure] = []
        self.world_size = job.ranks
        self.plan = Plan(job.ranks, "")
        self.restarts, self.cut_short = 0, False
        self.sight = RankProbe(self._signal)
        self.seen: dict[int, RankState] = {}
        self.hang_s: float | None = None
        self._say, stall_s = say or terminal.say, stall_after(job.stall_after_s)
        self._watch = Watch(stall_s, self._say, self.sight.ask_stacks)
        self._lingering = Lingering(stall_s)
        self._hang = HangLimit(*hang_timeout(job.hang_timeout_s), self._watch.progress, self.sight, stall_s)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.restarts += self.attempt is not None
        self.attempt, fds = self._begin_attempt(self.restarts)
        self.failures = []
        self.sight.close()
        self.seen, self.hang_s = {}, None
        # torchelastic does not count a restart that another node asked for.
        self._remaining_restarts = self._job.max_restarts - self.restarts
        try:
            for worker in worker_group.workers:
                info = self._rank_info(worker, worker_group)
                self.world_size = info.world_size
                request = dict(self._start_fields(self.attempt, info))
                request["env"] = {**request["env"], **info.to_env(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
                request["env"][STORE_PREFIX_VARIABLE] = f"{self._token}/{self.restarts}"
                request["pulse"] = True
                outputs = fds if info.rank == 0 else ()
                with self.sight.companions.make(info.rank) as asked:
                    shared = (*outputs, self.sight.pulses.make(info.rank), asked.fileno())
                    self.attempt.pids[info.rank] = self._server.fork(request, shared)
        finally:
            for fd in fds:
                os.close(fd)
        if self.restarts == 0 and self._job.max_restarts > 0:
            # A restart should not wait for what the first start imported rank by rank.
            self._server.preload(["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"])
        return {worker.local_rank: self.attempt.pids[worker.global_rank] for worker in worker_group.workers}

    def _rank_info(self, worker: Worker, group: WorkerGroup) -> RankInfo:
        assert group.master_addr is not None and group.master_port is not None  # the rendezvous has set them
        return RankInfo(
            rank=worker.global_rank,
            local_rank=worker.local_rank,
            node_rank=group.group_rank or 0,
            world_size=worker.world_size,
            local_world_size=group.spec.local_world_size,
            master_addr=group.master_addr,
            master_port=group.master_port,
            restart_count=self.restarts,
            run_id=group.spec.rdzv_handler.get_run_id(),
        )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
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
                attempt.forgiven.update(f.rank for f in failures)  # they lost a peer that had left as it was asked to
                return RunResult(WorkerState.HEALTHY)
            self.failures = failures
            self._plan_restart(attempt)
            return RunResult(WorkerState.FAILED, {}, {f.rank: self._as_torch(f, attempt) for f in failures})
        if looks and (idle_s := self._hangs(attempt)) is not None:
            return self._end_hung(attempt, idle_s)
        if len(attempt.ended) == len(attempt.pids):
            if not self._meetings.all_done():
                return RunResult(WorkerState.HEALTHY)
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(attempt.ended))
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise self.sight.timeout_error(attempt, self._timeout_s or 0.0)
        return RunResult(WorkerState.HEALTHY)

    def _hangs(self, attempt: Attempt) -> float | None:
        idle_s = self._hang.look(attempt)
        for line in (self._hang.quiet(), self._hang.left(attempt), self._lingering.look(attempt)):
            if line is not None:
                self._say(line)
        # A node whose ranks have all ended hears of the others' end by itself.
        all_late = self._meetings.all_late(idle_s is not None or (self._hang.after_s > 0 and not attempt.running))
        return idle_s if all_late else None

    def _end_hung(self, attempt: Attempt, idle_s: float) -> RunResult:
        self.seen = self.sight.gather(attempt, self._hang.silent_s(), self._meetings.all_gathered)
        self.hang_s, now = idle_s, time.monotonic_ns()
        where = positions({rank: self.seen[rank] for rank in attempt.running}, attempt.running)
        headline = f"no rank made progress for {idle_s:.0f} s"
        own = {f.rank: f for f in attempt.failures()}  # one that has failed may wait in a function that it gave to atexit
        self.failures = [
            own.get(rank) or Failure(rank, HUNG, now, HANGS, where, log=attempt.log_path(rank), headline=headline)
            for rank in attempt.running
        ]
        self._plan_restart(attempt)
        return RunResult(WorkerState.FAILED, {}, {f.rank: self._as_torch(f, attempt) for f in self.failures})

    def _see_to_requests(self, attempt: Attempt, looks: bool) -> None:
        """Pass on what was asked of the ranks. Once one has left, or the time is up, the others have the grace time."""
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
            attempt.forgiven.update(rank for rank, code in attempt.exit_codes().items() if rank in late and code < 0)

    def _plan_restart(self, attempt: Attempt) -> None:
        """Whether there is a next attempt, and with how many ranks."""
        if self._requests.count or attempt.left():
            self._remaining_restarts = 0  # who was asked to stop is not started again
        elif self._job.min_ranks is not None and self._remaining_restarts:
            loaders = loaders_of(attempt.folder.parent)
            self.plan = next_ranks(len(attempt.pids), self._job.min_ranks, self.failures, loaders)
            if not self.plan.ranks:
                self._remaining_restarts = 0

    def _hear_them_out(self) -> list[Failure]:
        """Ranks fall within milliseconds of one another: wait, so that the first is found by its time, not by luck.

        While all that is known is that a peer has gone, wait longer for that peer.
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
        """0 is none."""
        return self._hang.after_s

    def moves(self) -> dict[tuple[str, int], object]:
        """What changes as this node's ranks come on, of all that can be asked; from any thread."""
        attempt = self.attempt
        if attempt is None:
            return {}
        running = [rank for rank in list(attempt.pids) if rank not in attempt.ended]
        answers = self.sight.companions.ask(running, HOW_FAR, _ANSWER_S)
        calls = {("calls", rank): answer.called for rank, answer in answers.items()}
        return {("attempt", attempt.number): len(running), **{("at", r): self.sight.pulses.read(r) for r in running}, **calls}

    def end_at_once(self) -> None:
        """Ends the ranks from any thread, when the main one does not come to it."""
        self._server.kill()

    def _gather(self, attempt: Attempt) -> dict[int, RankState]:
        self.seen = self.sight.gather(attempt, self._hang.silent_s())
        return self.seen

    def _signal(self, rank: int, number: int) -> None:
        assert self.attempt is not None
        pid = self.attempt.pids[rank]
        if number != STACK_SIGNAL or has_handler(pid, number):  # else it has become another program, which that would end
            self._server.signal(pid, number, group=False)

    def exit_code(self, otherwise: int) -> int:
        """75 if the ranks have left to be started again, else what the caller made of their ends."""
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

    @staticmethod
    def _as_torch(failure: Failure, attempt: Attempt) -> ProcessFailure:
        return ProcessFailure(
            local_rank=list(attempt.pids).index(failure.rank),
            pid=attempt.pids[failure.rank],
            exitcode=failure.exit_code,
            error_file="",  # ours has another form
        )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end(signal.SIGTERM, min(_FAILURE_GRACE_S if self.hang_s is None else _HUNG_GRACE_S, self._job.grace_s))
        if self.plan.ranks:  # the next rendezvous hands out so many places
            worker_group.spec.local_world_size = self.plan.ranks

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self.attempt is not None and self.attempt.running and not self.seen:
            self._gather(self.attempt)  # who ends a run that seems to hang wants to know where it stood
        # A terminal that has gone asks for what SIGTERM asks for, which programs of any kind know.
        self._end(signal.SIGTERM if death_sig == signal.SIGHUP else death_sig, self._job.grace_s)  # torch's is in whole seconds
        self._worker_group.spec.rdzv_handler.shutdown()

    def _end(self, number: int, grace_s: float) -> None:
        """Ask the ranks that still run to stop, and kill those that have not by the end of the grace time.

        The request goes to the rank alone: it may want to save, for which it needs its data workers and helpers.
        """
        if self.attempt is None:
            return
        if not self.seen:
            self.seen = self.sight.look(self.attempt, self._hang.silent_s())
        for sign, wait_s in ((number, grace_s), (signal.SIGKILL, 10.0)):
            for pid in [self.attempt.pids[rank] for rank in self.attempt.running]:
                self._server.signal(pid, sign, group=sign == signal.SIGKILL)
                if sign != signal.SIGKILL:
                    self._server.signal(pid, signal.SIGCONT)  # a stopped process would not get the first one
            until = time.monotonic() + wait_s
            while len(self.attempt.ended) < len(self.attempt.pids) and time.monotonic() < until:
                self._note_ends(min(0.1, max(0.001, until - time.monotonic())))


def _name_stopped(failures: list[Failure], seen: Mapping[int, RankState]) -> list[Failure]:
    """Add to the failures' messages which ranks are stopped."""
    stopped = [rank for rank, s in seen.items() if s.stopped]
    if not stopped:
        return failures
    hint = f"(rank {', '.join(map(str, stopped))} is stopped, as by SIGSTOP or a debugger)"
    return [replace(f, message=f"{f.message}\n{hint}") for f in failures]


def quiet_elastic_logs() -> None:
    """torchelastic warns of each failure in its own words; ours say it once, with the cause first."""
    import logging

    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):  # which sets a level of its own
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("torchelastic-events-null").propagate = False  # one JSON line per change of state
    if not sys.warnoptions:
        import warnings

        warnings.filterwarnings("ignore", module=r"torch\.distributed\.elastic.*")


# Says of a rank whose program has ended well, and whose process runs on, what keeps it: everybody waits, and nothing moves.


class Lingering:
    """Of the ranks of one attempt after another. It ends nothing: a thread may write to a slow disk.

    Args:
        after_s: a process may take so long to end.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._attempt: Attempt | None = None
        self._since: dict[int, float] = {}
        self._said = set[int]()

    def look(self, attempt: Attempt) -> str | None:
        """A line for people, once for each rank; called about once a second."""
        if attempt is not self._attempt:
            self._attempt, self._since, self._said = attempt, {}, set()
        now = time.monotonic()
        for rank in attempt.running:
            if rank not in self._since and os.path.lexists(attempt.record_path(rank)):
                self._since[rank] = now
        late = [rank for rank in attempt.running if now - self._since.get(rank, now) > self._after_s and rank not in self._said]
        if not late:
            return None
        self._said.update(late)
        several = len(late) > 1
        who = f"rank{'s' if several else ''} {', '.join(map(str, late))}"
        has, its, runs = ("have", "their processes", "run") if several else ("has", "its process", "runs")
        return (
            f"{who} {has} come to the end of the program, and {its} {runs} on for {self._after_s:.0f} s: a thread that is no "
            f"daemon, or a function given to atexit, has not ended"
        )
