"""A launch command, such as `accelerate launch` or `torchrun`: checked when a job is submitted, and run once on every node.

It is a list of words, never text for a shell. The ranks that it starts run the user's script again, up to the submitted call
(`launcher.functions.inside`). From the files that they leave, this module writes the node's record.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from echelon.common.errors import LaunchError, require
from echelon.common.files import open_to_append, parse_object, read_bytes, read_end
from echelon.common.redact import redacted_words
from echelon.common.terminal import say
from echelon.contracts.expected_world import ExpectedWorld
from echelon.contracts.records import place_record, rank_record
from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE, handling
from echelon.diagnosis.failure import Failure
from echelon.launcher.calls import checksum
from echelon.launcher.functions.inside import CallSite
from echelon.launcher.job import JobSpec, Outcome
from echelon.launcher.local.end_record import write_exit
from echelon.launcher.local.hang import hang_timeout
from echelon.launcher.local.nodes import Meeting, free_port
from echelon.launcher.local.processes import descends, kill_children, runs, signal_if
from echelon.launcher.local.run import rank_environment
from echelon.launcher.local.server import adopt_orphans, die_with_parent
from echelon.launcher.local.silence import NodeSilentError, Silence

__all__ = ["PLACEHOLDERS", "parse", "run_command", "substitute"]

PLACEHOLDERS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SHELL = {"&&", "||", "|", ";", "&", ">", ">>", "<", "2>&1"}
# Variables that would give the ranks the identity of another job or place.
_FOREIGN = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|ROLE_|GROUP_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|ECHELON_(ASKED|CALL|STORE_PREFIX))"
)
_POLL_S = 0.05
# All failed ranks of this node may have lost a peer only: time to wait for failures of other nodes.
_CULPRIT_WAIT_S = 5.0
_LAST_WAIT_S = 5.0
_TAIL_LINES = 15
_MOST_LOG = 16 << 20


def parse(command: str) -> list[str]:
    """The words of a launch command.

    Raises:
        UsageError: an unknown placeholder, an unbalanced quote, or words that only a shell would understand.
    """
    require(command.isprintable(), "distributed_launch_command", "one line without control characters", command, kind=LaunchError)
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise LaunchError(f"distributed_launch_command cannot be split into words ({error}), got {command!r}.") from None
    if not words:
        raise LaunchError(
            "distributed_launch_command must be a command such as torchrun --nproc-per-node {num_processes} main.py, got nothing."
        )
    for name in _FIELD.findall(command):
        if name not in PLACEHOLDERS:
            known = ", ".join(f"{{{p}}}" for p in PLACEHOLDERS)
            raise LaunchError(f"the placeholders of distributed_launch_command must be among {known}, got {{{name}}}.")
    if shell := next((word for word in words if word in _SHELL), None):
        raise LaunchError(
            f"distributed_launch_command must do without a shell, got {shell!r}. Put what comes before it into `setup`."
        )
    return words


def substitute(words: Sequence[str], values: Mapping[str, str | int]) -> list[str]:
    """The words with each placeholder replaced; other braces stay, as in JSON."""
    return [_FIELD.sub(lambda m: str(values.get(m[1], m[0])), word) for word in words]


def run_command(spec: JobSpec, attempt_dir: RunDir, meeting: Meeting, task: int, key: str) -> Outcome:
    """Run the command on this node until it and its ranks have ended, and write the node's record.

    Raises:
        UsageError: the program does not exist.
    """
    about = _about(spec)
    at = CallSite(str(attempt_dir.attempt_path.absolute()), meeting.node, task=task, key=key, **about["call"])
    given = {k: v for k, v in os.environ.items() if not _FOREIGN.fullmatch(k)}
    env = {**rank_environment(spec, attempt_dir, given, spec.ranks, restart=False, meeting=meeting), **at.to_env()}
    env["ECHELON_SCREEN"] = "launcher"
    asked = ExpectedWorld(spec.ranks * spec.nodes, spec.nodes, " ".join(redacted_words(spec.args)))
    env.update(asked.to_env())
    values: dict[str, str | int] = {
        "num_processes": spec.ranks * spec.nodes,
        "num_machines": spec.nodes,
        "machine_rank": meeting.node,
        "main_process_ip": meeting.host,
        "main_process_port": meeting.command_port or free_port(),
    }
    words = [*substitute(spec.args, values), *about["argv"]]
    # `python` and `accelerate` are those of the interpreter that submitted, whatever a login shell would find first.
    env["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), env.get("PATH", os.defpath)))
    words[0] = _program(words[0], env)
    if meeting.reserved is not None:
        meeting.reserved.close()  # it reserved the port for the command
    command = _Command(spec, attempt_dir, meeting, asked)
    try:
        outcome, failures = command.run(words, env)
    except NodeSilentError as error:
        command.record_silence(str(error))
        raise
    write_exit(meeting.exit_path(attempt_dir), outcome.exit_code, failures, outcome.failure, command.gave_up)
    return outcome


def _about(spec: JobSpec) -> dict[str, Any]:
    """The call of the script, and the script's own arguments.

    Raises:
        UsageError: the file is not what was submitted.
    """
    try:
        text = read_bytes(spec.code)
    except OSError as error:
        raise LaunchError(f"{spec.code} cannot be read: {error.strerror}. Submit again.") from error
    about = parse_object(text) if checksum(text) == spec.sha256 else None
    if about is None:
        raise LaunchError(f"{spec.code} is not what was submitted. Who can write there? Submit again.")
    return about


def _program(name: str, env: Mapping[str, str]) -> str:
    """The program's path on the PATH of `env`."""
    program = shutil.which(name, path=env["PATH"])
    if program is None:
        raise LaunchError(
            f"distributed_launch_command begins with {name!r}, and {socket.gethostname()} has no such program, neither beside "
            f"{sys.executable} nor on its PATH. Install it, name it with its whole path, or load its environment in `setup`."
        )
    return program


class _Command:
    """The command of one node while it runs. The ranks' progress is only visible by their output.

    Attributes:
        ended: when each rank of this node was seen to have ended, in ns of the monotonic clock.
        left: ranks that ended on request, to resume later.
        stopped_by: the signal that asked the whole job to end.
        cut_short: ranks were killed because others had left on request.
        silent: why the ranks are to be ended, if another node has been silent for too long. Set by a thread.
        gave_up: that another node was silent when ranks, or the command, ended by themselves; empty otherwise.
    """

    silent = gave_up = ""
    end_at_once = staticmethod(kill_children)

    def __init__(self, spec: JobSpec, attempt_dir: RunDir, meeting: Meeting, asked: ExpectedWorld) -> None:
        self.spec, self.meeting, self.attempt_dir, self.asked = spec, meeting, attempt_dir, asked
        self.folder = attempt_dir.attempt_path
        self.log = self.folder / f"node{meeting.node}.log"
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.left: set[int] = set()
        self.local_world_size = 0
        self._find_at, self._pause_s = 0.0, _POLL_S
        self.wishes, self.told = 0, dict[int, int]()
        self.stopped_by: int | None = None
        self.cut_short = False
        self.hang_limit_s = hang_timeout(spec.hang_timeout_s)[0]
        self.silence = Silence(meeting, say, self, self.record_silence, serves=True)

    @property
    def attempt(self) -> object:
        """The ranks that have begun their call. A command starts them once its nodes have met, so then silence counts."""
        return self.pids or None

    def moves(self) -> dict[tuple[str, int], object]:
        """The amount of output of this node's ranks."""
        logs = [self.log, *(self.folder / f"rank{rank}.log" for rank in self.pids)]
        return {(str(path), 0): path.stat().st_size for path in logs if path.exists()}

    def record_silence(self, why: str) -> None:
        """Record that the ranks were ended because another node is silent, and that a restart is worthwhile. From any thread."""
        write_exit(self.meeting.exit_path(self.attempt_dir), REQUEUE, stopped=why)

    def run(self, words: Sequence[str], env: Mapping[str, str]) -> tuple[Outcome, list[Failure]]:
        adopt_orphans()
        with contextlib.ExitStack() as ending:
            ending.callback(kill_children)
            ending.enter_context(handling(self._handlers()))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
            with open(open_to_append(self.log), "w") as log:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(env), preexec_fn=_before_exec
                )
            if self.meeting.nodes > 1:
                self.silence.start()
                ending.callback(self.silence.close)
            code = self._wait(process)
        return self._outcome(code)

    def _handlers(self) -> dict[signal.Signals, Callable[[int, FrameType | None], None]]:
        def wish(number: int, frame: FrameType | None) -> None:
            self.wishes += 1
            with contextlib.suppress(OSError):
                os.write(2, b"echelon: SIGUSR1: asked the ranks to save and end\n")

        def stop(number: int, frame: FrameType | None) -> None:
            self.stopped_by = self.stopped_by or number

        return {signal.SIGUSR1: wish, signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: stop}

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until the command and its ranks have ended; returns its exit code. A rank may outlive the command."""
        asked = False
        until: float | None = None
        while True:
            code = process.poll()
            running = self._look(now=code is not None)
            if code is not None and not running:
                return code
            if self.silent:
                raise NodeSilentError(self.silent)
            self._pass_on(running)
            if self.stopped_by is not None and not asked:
                asked, until = True, time.monotonic() + self.spec.grace_s
                process.terminate()
            if until is None and (code is not None or self.left):
                until = time.monotonic() + (self.spec.grace_s if self.left else _LAST_WAIT_S)
            if until is not None and time.monotonic() > until:
                self.cut_short = bool(self.left)
                kill_children()
                return process.wait()
            time.sleep(_POLL_S)

    def _record(self, rank: int) -> Path:
        return self.folder / f"exit.rank{rank}.json"

    def _look(self, *, now: bool) -> list[int]:
        """The running ranks of this node that have begun the call. Reads the folder `now`, or after growing pauses."""
        if now or time.monotonic() > self._find_at:
            self._pause_s = min(2.0, self._pause_s * 1.1)  # a shared file system serves everybody
            self._find_at = time.monotonic() + self._pause_s
            self._find()
        for rank in [r for r, pid in self.pids.items() if r not in self.ended and not runs(pid)]:
            self.ended[rank] = time.monotonic_ns()  # never checked again: the number may go to another process
            if (rank_record(self._record(rank)) or {}).get("exit_code") == REQUEUE:
                self.left.add(rank)
        return [rank for rank in self.pids if rank not in self.ended]

    def _find(self) -> None:
        for path in self.folder.glob(f"pid.node{self.meeting.node}.rank*.json"):
            about = place_record(path)
            if about is None:
                continue
            rank, pid = about["rank"], about["pid"]
            self.local_world_size = about["local_world_size"]
            if self.pids.get(rank) != pid:  # also if the command restarted its ranks itself
                self.pids[rank] = pid
                self.ended.pop(rank, None)
                self.told.pop(rank, None)

    def _pass_on(self, running: Sequence[int]) -> None:
        """Pass requests on to the running ranks, also to one that begins its call late."""
        for rank in running:
            if self.told.get(rank, 0) < self.wishes:
                self.told[rank] = self.wishes
                signal_if(self.pids[rank], signal.SIGUSR1, descends)  # the file may name any process

    def _outcome(self, code: int) -> tuple[Outcome, list[Failure]]:
        records = {rank: rank_record(self._record(rank)) for rank in sorted(self.pids)}
        codes = [record["exit_code"] if record else None for record in records.values()]
        failures = [self._failure(rank, record) for rank, record in records.items() if not record or _failed(record)]
        left = REQUEUE in codes
        # The command may fail in its own shutdown after all its work is done.
        well = bool(codes) and set(codes) == {0} and (code == 0 or len(codes) == self.local_world_size)
        if left or self.stopped_by is not None:  # then ranks that lost a peer or were killed have not failed
            ended = self.cut_short or self.stopped_by is not None
            failures = [f for f in failures if not f.is_victim and (f.reported or not ended)]
        elif not well and all(f.is_victim for f in failures) and (silent := self.silence.words()):
            self.gave_up = silent
            return Outcome(REQUEUE), []
        elif not failures and not well:
            failures = [self._command_failure(code, began=bool(records))]
        elif not failures and len(records) != self.spec.ranks:
            failures = [self._too_few(sorted(records))]
        elif failures and all(f.is_victim for f in failures):
            failures += self._of_other_nodes()
        if failures:
            first = Failure.first(failures)
            return Outcome(first.exit_code, first), failures
        if left:
            return Outcome(REQUEUE), []
        return Outcome(0 if well or self.stopped_by is None else 128 + self.stopped_by), []

    def _failure(self, rank: int, record: Mapping[str, Any] | None) -> Failure:
        log = self.folder / f"rank{rank}.log"
        if record is not None:
            return Failure.from_record(rank, int(record["exit_code"]), 0, record, log)
        text = f"it ended without a word: killed, perhaps for lack of memory (`dmesg`). The command's output: {self.log}"
        return Failure(rank, 1, self.ended.get(rank, 0), "exit", text, log=log, reported=False)

    def _command_failure(self, code: int, *, began: bool) -> Failure:
        """The failure of the command itself. The ranks left no error, so its last lines of output are the reason."""
        lines = read_end(self.log, _MOST_LOG).decode(errors="replace").splitlines()
        # The ranks' own error comes first; the log ends with torchrun's summary, which lacks the reason.
        first = next((n for n, line in enumerate(lines) if line.startswith("Traceback (")), len(lines) - _TAIL_LINES)
        lines = lines[max(0, first) :][:_TAIL_LINES]
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        what = "" if began else " before any rank came to the call that was submitted"
        text = "\n".join([f"the launch command {how}{what}. Its output:", *lines])
        rank = self.meeting.node * self.spec.ranks
        return Failure(rank, 128 - code if code < 0 else code or 1, time.monotonic_ns(), "exit", text, log=self.log)

    def _too_few(self, ranks: Sequence[int]) -> Failure:
        """A failure for too few ranks: all that reached the call ended well."""
        came = f"{len(ranks)} came to the call on node {self.meeting.node} (rank {', '.join(map(str, ranks))})"
        return Failure(
            ranks[0], 1, time.monotonic_ns(), "LauncherEnvironmentError", str(self.asked.error(came)), ours=True, log=self.log
        )

    def _of_other_nodes(self) -> list[Failure]:
        """Failures of ranks of other nodes that failed by themselves. Waits until these nodes' launchers have ended, too."""
        others = [n for n in range(self.meeting.nodes) if n != self.meeting.node]
        until = time.monotonic() + _CULPRIT_WAIT_S
        while time.monotonic() < until:
            failures = [
                Failure.from_record(rank, int(record["exit_code"]), 0, record, self.folder / f"rank{rank}.log")
                for path in sorted(self.folder.glob("exit.rank*.json"))
                if (rank := _rank_of(path)) not in self.pids and (record := rank_record(path)) is not None and _failed(record)
            ]
            if culprits := [f for f in failures if not f.is_victim]:
                return culprits
            if all(self.attempt_dir.node_exit(n).exists() for n in others):
                break
            time.sleep(_POLL_S)
        return []


def _rank_of(path: Path) -> int:
    number = path.name.split(".")[1].removeprefix("rank")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1


def _failed(record: Mapping[str, Any]) -> bool:
    return int(record["exit_code"]) not in (0, REQUEUE)


def _before_exec() -> None:
    """Runs in the child. Slurm sends SIGUSR1 to every process of a step, which would kill the command."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent(signal.SIGTERM)
