"""The interface of every launcher: it takes a JobSpec and a run folder, and returns a FolderJob to query, stop and wait for.

A job is known by its run folder, so another process can find it later: `job_of(run)`.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echelon.common.errors import RankFailedError, RunFolderError, require
from echelon.common.files import open_file, parse_object, private_folder, write_whole
from echelon.common.terminal import printable
from echelon.common.trust import check_parents, read_trusted, why_untrusted
from echelon.contracts.records import exit_record
from echelon.contracts.run_dir import RunDir, read_json, write_json
from echelon.contracts.stopping import REQUEUE
from echelon.diagnosis.failure import Failure, render
from echelon.launcher.job import JobSpec, Outcome, spec_of

__all__ = ["FolderJob", "JobState", "note_submitted", "read_spec", "write_spec"]


class JobState(enum.Enum):
    """The state of a job. `STOPPED`: it saved and can be resumed. `LOST`: how it ended is unknown."""

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


def write_spec(run: RunDir, spec: JobSpec, *, launcher: str, **more: Any) -> str:
    """Write the submitted job into the run's folder, for the nodes that run it and the commands that query it.

    Args:
        more: plain values to store with it.
    Returns:
        the SHA-256 of the file, for `read_spec`. The file holds a secret number, so nobody else can write the same file again.
    Raises:
        UsageError: another user could change what the job runs.
    """
    folder = run.path / "job"
    try:
        private_folder(folder, 0o700)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be created: {error.strerror}. Choose another --name.") from error
    check_parents(run.path)
    for path in (run.path, folder):
        if why := why_untrusted(path, os.stat(path)):
            raise RunFolderError(why)
    (folder / _SUBMITTED).unlink(missing_ok=True)  # of an earlier job
    text = json.dumps({"spec": asdict(spec), "launcher": launcher, **more, "key": secrets.token_hex(32)}, indent=2)
    write_whole(folder / _JOB, text)
    return hashlib.sha256(text.encode()).hexdigest()


def read_spec(run: RunDir, sha256: str | None = None, *, believe: bool = True) -> tuple[JobSpec, Mapping[str, Any]]:
    """The job that `write_spec` and `note_submitted` wrote, and all other values by name.

    Args:
        sha256: the checksum from `write_spec`, passed another way: by Slurm's copy of the batch script or a command line.
        believe: the values decide what runs, or which process is ended. Otherwise they are only shown, and `said["doubt"]` is the
            reason not to trust them.
    Raises:
        UsageError: the folder holds no submitted job, or another user may have written it.
    """
    try:
        text, why = read_trusted(run.path / "job", _JOB, _MOST_BYTES)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise RunFolderError(f"{run.path} holds no submitted job (no job/job.json in it).") from None
        why = f"job/job.json: {error.strerror}"
        raise RunFolderError(
            f"{run.path} holds no submitted job that can be read ({why}). Remove it, or choose another --name."
        ) from None
    digest = hashlib.sha256(text).hexdigest()
    if sha256 is not None and digest != sha256:
        raise RunFolderError(
            f"{run.path / 'job' / _JOB} is not what was submitted: its SHA-256 begins with {digest[:12]}, not "
            f"{sha256[:12]}. "
            "Nothing of it was run. Who can write there? Submit again."
        )
    if believe:
        check_parents(run.path)
        if why:
            raise RunFolderError(why)
    fields = parse_object(text)
    spec = spec_of(fields.pop("spec", None)) if fields is not None else None
    if fields is None or spec is None or not _is_said(fields):
        raise RunFolderError(
            f"{run.path} holds no submitted job that can be read (job/job.json is damaged). Remove it, or choose another --name."
        )
    known = read_json(run.path / "job" / _SUBMITTED) or {}
    return spec, {**fields, **{k: v for k, v in known.items() if k in _LATER}, "doubt": why}


def note_submitted(run: RunDir, **more: Any) -> None:
    """Record the name under which the system knows the job, once it has one; job.json itself never changes."""
    write_json(run.path / "job" / _SUBMITTED, more)


_JOB, _SUBMITTED = "job.json", "submitted.json"
_LATER = ("id", "host", "boot", "ticks")
_MOST_BYTES = 16 << 20


def _is_said(value: Mapping[str, Any]) -> bool:
    sweep = value.get("sweep", [])
    return (
        all(isinstance(value.get(name, ""), str) for name in ("launcher", "cwd", "id", "key"))
        and isinstance(sweep, list)
        and all(isinstance(each, list) and len(each) == 2 and all(isinstance(word, str) for word in each) for each in sweep)
    )


class FolderJob(ABC):
    """A submitted job, as its folder describes it. A launcher implements `_ask` and `_stop`.

    Attributes:
        id: the system's name of it: Slurm's number, or a process id.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.spec, self.said = read_spec(run, believe=False)
        self.id = str(self.said.get("id", ""))

    @property
    def ranks(self) -> int:
        """Number of processes on all nodes together."""
        return self.spec.ranks * self.spec.nodes

    def verified(self) -> Mapping[str, Any]:
        """The values stored with the job.

        Raises:
            UsageError: another user may have written them.
        """
        if why := str(self.said["doubt"]):
            raise RunFolderError(why)
        return self.said

    @abstractmethod
    def _ask(self) -> tuple[JobState | None, str]:
        """The system's state of the job, and the reason; None if the system no longer knows the job."""

    @abstractmethod
    def _stop(self) -> None:
        """Ask the system to end the job."""

    @property
    def attempts(self) -> Sequence[Path]:
        return self.run.attempts()

    def state(self) -> JobState:
        return self.look()[0]

    def why(self) -> str:
        """The system's own reason for the state; empty if it gives none."""
        return self.look()[1]

    def look(self) -> tuple[JobState, str]:
        """`state` and `why` with one query to the system."""
        state, why = self._ask()
        if state is None:
            state = self._state_of_folder()
        if state.has_ended and (self.run.path / "job" / "cancelled").exists() and state is not JobState.DONE:
            state = JobState.CANCELLED
        return state, why

    def _state_of_folder(self) -> JobState:
        ended = exit_record(self.attempts[-1] / "exit.json") if self.attempts else None
        if ended is None:
            return JobState.LOST
        return {0: JobState.DONE, REQUEUE: JobState.STOPPED}.get(int(ended["exit_code"]), JobState.FAILED)

    def log(self, rank: int = 0) -> Path:
        """The file with the output of a rank, in the newest attempt; it need not exist yet."""
        require(0 <= rank < self.ranks, "rank", f"between 0 and {self.ranks - 1}", rank, kind=RunFolderError)
        newest = self.attempts[-1] if self.attempts else self.run.path / "attempts" / "000"
        return newest / f"rank{rank}.log"

    def cancel(self) -> None:
        """End the job.

        Raises:
            UsageError: another user may have written which process or job to end.
        """
        self.verified()
        # First: the job must see, when asked to stop, that it shall not be queued again.
        os.close(open_file(self.run.path / "job" / "cancelled", os.O_WRONLY | os.O_CREAT))
        self._stop()

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait until the job has ended.

        Raises:
            TimeoutError: it has not ended after `timeout_s`. It continues.
        """
        until = time.monotonic() + timeout_s if timeout_s is not None else None
        pause_s = 0.1
        while not (state := self.state()).has_ended:
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"job {self.id} is still {state.value} after {timeout_s:g} s.")
            time.sleep(pause_s)
            pause_s = min(2.0, pause_s * 1.2)  # Slurm's controller serves all users
        return self.outcome(state)

    def outcome(self, state: JobState) -> Outcome:
        ended = (exit_record(self.attempts[-1] / "exit.json") if self.attempts else None) or {}
        first = ended.get("first_failure")
        failure = Failure.from_json(first) if first else None
        usual = {JobState.DONE: 0, JobState.STOPPED: REQUEUE, JobState.CANCELLED: 143}.get(state, 1)
        why = f": {ended['stopped']}" if ended.get("stopped") else ""
        return Outcome(int(ended.get("exit_code", usual)) or usual, failure, note=f"job {self.id}: {state.value}{why}")

    def result(self, timeout_s: float | None = None) -> Outcome:
        """Wait as `wait` does, and raise if the job failed.

        Raises:
            RankFailedError: the first failing rank's own traceback; also for a job that was cancelled or lost.
        """
        outcome = self.wait(timeout_s)
        if outcome.exit_code == 0:
            return outcome
        failure = outcome.failure
        text = render(failure, self.ranks) if failure else f"{outcome.note}. {self.why()}".strip()
        if failure is not None and failure.traceback:
            text = f"{text}\n{printable(failure.traceback)}"
        logs = str(self.attempts[-1]) if self.attempts else None
        raise RankFailedError(text, rank=failure.rank if failure else 0, exit_code=outcome.exit_code, logs=logs)
