"""The job of a function: its state, and its values by rank or the error of the rank that failed first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echelon.common.errors import ClusterError, RankFailedError
from echelon.common.files import read_end
from echelon.common.terminal import printable
from echelon.contracts.records import exit_record
from echelon.contracts.run_dir import RunDir
from echelon.launcher.calls import load_exception, load_values
from echelon.launcher.job import Outcome
from echelon.launcher.protocol import FolderJob, JobState

__all__ = ["FinishedJob", "FunctionJob"]

_TAIL_LINES = 5


class FunctionJob:
    """A submitted call of a function."""

    def __init__(self, job: FolderJob) -> None:
        self._job = job

    def __repr__(self) -> str:
        return f"FunctionJob({self.id}, {str(self.run.path)!r})"

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def run(self) -> RunDir:
        return self._job.run

    @property
    def ranks(self) -> int:
        return self._job.ranks

    @property
    def backend(self) -> type[FolderJob]:
        """The class of the job."""
        return type(self._job)

    def state(self) -> JobState:
        return self._job.state()

    def why(self) -> str:
        """The system's own reason for the state; empty if it gives none."""
        return self._job.why()

    def done(self) -> bool:
        return self.state().has_ended

    def log(self, rank: int = 0) -> Path:
        """The file with the output of a rank, in the newest start; it may not exist yet."""
        return self._job.log(rank)

    def cancel(self) -> None:
        self._job.cancel()

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait until the job has ended, in whatever way.

        Raises:
            TimeoutError: it has not ended after `timeout_s`. It continues.
        """
        return self._job.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> Any:
        """The function's value; with several ranks, the list of their values.

        Raises:
            RankFailedError: with the traceback of the rank that failed first; its exception is the `__cause__`, if it could be
                sent. Also for a job that was cancelled or lost.
            TimeoutError: it has not ended after `timeout_s`. It continues.
        """
        values = self.results(timeout_s)
        return values[0] if len(values) == 1 else values

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """As `result`, but always a list."""
        try:
            self._job.result(timeout_s)
        except RankFailedError as error:
            failed = error
        else:
            return self._values()
        folder = self._job.attempts[-1] if self._job.attempts else None
        ended = (exit_record(folder / "exit.json") if folder is not None else None) or {}
        if folder is not None and ended.get("first_failure"):
            raise failed from load_exception(_value(folder, failed.rank, ".error"), self._key)
        text = f"{failed}\n{printable(self._last_words())}".rstrip()
        raise RankFailedError(text, rank=failed.rank, exit_code=failed.exit_code, logs=failed.logs) from None

    @property
    def _key(self) -> str:
        key = str(self._job.verified().get("key", ""))
        if not key:
            raise ClusterError(f"{self.run.path} was submitted by an earlier version, whose values have no seal. Submit again.")
        return key

    def _values(self) -> list[Any]:
        folder = self._job.attempts[-1]
        return load_values([_value(folder, rank) for rank in range(self.ranks)], self._key)

    def _last_words(self) -> str:
        """The last lines of the batch script and the launchers, for failures of which no rank could tell."""
        try:
            lines = read_end(self.run.path / "job" / "output.log").decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_TAIL_LINES:])


def _value(folder: Path, rank: int, suffix: str = "") -> Path:
    return folder / f"value.rank{rank}.pkl{suffix}"


class FinishedJob:
    """A call that was made in this process and has returned a value."""

    id = "here"
    ranks = 1
    run: RunDir | None = None
    backend: type[FolderJob] | None = None

    def __init__(self, value: Any) -> None:
        self._value = value

    def state(self) -> JobState:
        return JobState.DONE

    def why(self) -> str:
        return ""

    def done(self) -> bool:
        return True

    def log(self, rank: int = 0) -> Path:
        raise ClusterError("the function was called in this process: its output is here.")

    def cancel(self) -> None:
        """Does nothing: the call has ended."""

    def wait(self, timeout_s: float | None = None) -> Outcome:
        return Outcome(0)

    def result(self, timeout_s: float | None = None) -> Any:
        return self._value

    def results(self, timeout_s: float | None = None) -> list[Any]:
        return [self._value]
