"""What every launcher promises: a JobSpec and a run folder go in, a Job comes out that can be asked, stopped and waited for.

A job is known by its run folder, so that another process, another day, finds it again: `job_of(run)`.
"""

from __future__ import annotations

import enum
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

from echelon.contracts.errors import RankFailedError, UsageError
from echelon.contracts.run_dir import RunDir, read_json
from echelon.launcher.failure import render
from echelon.launcher.job import Failure, JobSpec, Outcome

__all__ = ["FolderJob", "Job", "JobState", "Launcher", "read_spec", "update_spec", "write_atomically", "write_spec"]


class JobState(enum.Enum):
    """Where a job is. `STOPPED` has saved and can go on; `LOST` ended without a trace of how."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def has_ended(self) -> bool:
        return self not in (JobState.PENDING, JobState.RUNNING)


class Job(Protocol):
    """A submitted job."""

    @property
    def id(self) -> str:
        """The name under which the system knows it: Slurm's number, a process id."""

    @property
    def run(self) -> RunDir: ...

    @property
    def ranks(self) -> int:
        """How many processes it has, on all nodes together."""

    def state(self) -> JobState: ...

    def why(self) -> str:
        """The system's own reason for the state; empty if it gives none."""

    def log(self, rank: int = 0) -> Path:
        """The file with the output of a rank, in the newest attempt; it need not exist yet."""

    def cancel(self) -> None: ...

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Until it has ended.

        Raises:
            TimeoutError: it has not after `timeout_s`. It goes on.
        """

    def result(self, timeout_s: float | None = None) -> Outcome:
        """As `wait`.

        Raises:
            RankFailedError: the first failing rank's own traceback; also for a job that was cancelled or lost.
        """


class Launcher(Protocol):
    def submit(self, spec: JobSpec, run: RunDir) -> Job:
        """Start `spec` in the folder `run`, or have it started later."""


def write_spec(run: RunDir, spec: JobSpec, *, launcher: str, **more: Any) -> None:
    """Keep what was submitted in the run's folder, for the nodes that will run it and the commands that ask for it."""
    folder = run.path / "job"
    folder.mkdir(mode=0o700, exist_ok=True)
    text = json.dumps({"spec": asdict(spec), "launcher": launcher, **more}, indent=2)
    write_atomically(folder / "job.json", text + "\n")


def read_spec(run: RunDir) -> tuple[JobSpec, Mapping[str, Any]]:
    """What `write_spec` wrote: the job, and everything else by name.

    Raises:
        UsageError: the folder is not that of a submitted job.
    """
    said = read_json(run.path / "job" / "job.json")
    if said is None:
        raise UsageError(f"{run.path} holds no submitted job (no job/job.json in it).")
    known = {f.name for f in fields(JobSpec)}
    spec = JobSpec(**{k: v for k, v in said.pop("spec").items() if k in known})
    return spec, said


class FolderJob(ABC):
    """The part of a job that its folder tells; what is left to a launcher is `_ask` and `_stop`."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.spec, self.said = read_spec(run)
        self.id = str(self.said.get("id", ""))

    @property
    def ranks(self) -> int:
        return self.spec.ranks * self.spec.nodes

    @abstractmethod
    def _ask(self) -> tuple[JobState | None, str]:
        """What the system says of the job, and why; None if it no longer knows it."""

    @abstractmethod
    def _stop(self) -> None:
        """Ask the system to end it."""

    @property
    def attempts(self) -> Sequence[Path]:
        return sorted((self.run.path / "attempts").glob("[0-9]*"))

    def state(self) -> JobState:
        state, _ = self._ask()
        if state is None:
            state = self._state_of_folder()
        if state.has_ended and (self.run.path / "job" / "cancelled").exists() and state is not JobState.DONE:
            return JobState.CANCELLED
        return state

    def why(self) -> str:
        return self._ask()[1]

    def _state_of_folder(self) -> JobState:
        ended = read_json(self.attempts[-1] / "exit.json") if self.attempts else None
        if ended is None:
            return JobState.LOST
        return {0: JobState.DONE, 75: JobState.STOPPED}.get(int(ended["exit_code"]), JobState.FAILED)

    def log(self, rank: int = 0) -> Path:
        if not 0 <= rank < self.ranks:
            raise UsageError(f"rank {rank}: the job has ranks 0 to {self.ranks - 1}.")
        newest = self.attempts[-1] if self.attempts else self.run.path / "attempts" / "000"
        return newest / f"rank{rank}.log"

    def cancel(self) -> None:
        # First: a job that is asked to stop must know that it shall not come back.
        (self.run.path / "job" / "cancelled").touch(mode=0o600)
        self._stop()

    def wait(self, timeout_s: float | None = None) -> Outcome:
        until = time.monotonic() + timeout_s if timeout_s is not None else None
        pause_s = 0.1
        while not (state := self.state()).has_ended:
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"job {self.id} is {state.value} after {timeout_s:g} s.")
            time.sleep(pause_s)
            pause_s = min(2.0, pause_s * 1.2)  # a controller is asked by everybody
        return self.outcome(state)

    def outcome(self, state: JobState) -> Outcome:
        ended = (read_json(self.attempts[-1] / "exit.json") if self.attempts else None) or {}
        first = ended.get("first_failure")
        failure = Failure.from_json(first) if first else None
        usual = {JobState.DONE: 0, JobState.STOPPED: 75, JobState.CANCELLED: 143}.get(state, 1)
        why = f": {ended['stopped']}" if ended.get("stopped") else ""
        return Outcome(int(ended.get("exit_code", usual)) or usual, failure, note=f"job {self.id}: {state.value}{why}")

    def result(self, timeout_s: float | None = None) -> Outcome:
        outcome = self.wait(timeout_s)
        if outcome.exit_code == 0:
            return outcome
        failure = outcome.failure
        text = render(failure, self.ranks) if failure else f"{outcome.note}. {self.why()}".strip()
        if failure is not None and failure.traceback:
            text = f"{text}\n{failure.traceback}"
        logs = str(self.attempts[-1]) if self.attempts else None
        raise RankFailedError(text, rank=failure.rank if failure else 0, exit_code=outcome.exit_code, logs=logs)


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """A file that only its owner reads, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    temporary.replace(path)


def update_spec(run: RunDir, **more: Any) -> None:
    """Add to what `write_spec` wrote."""
    path = run.path / "job" / "job.json"
    write_atomically(path, json.dumps({**(read_json(path) or {}), **more}, indent=2) + "\n")
