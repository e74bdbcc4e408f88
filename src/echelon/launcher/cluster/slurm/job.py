"""A job on Slurm: submit, query, cancel."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echelon.common.errors import ClusterError
from echelon.common.files import private_folder, write_whole
from echelon.contracts.run_dir import RunDir
from echelon.launcher.cluster.slurm import commands
from echelon.launcher.cluster.slurm.render import SlurmOptions, render
from echelon.launcher.job import JobSpec
from echelon.launcher.protocol import FolderJob, JobState, note_submitted, write_spec

__all__ = ["SlurmJob", "SlurmLauncher"]

_NUMBER = re.compile(r"[0-9]{1,12}(_[0-9]{1,9})?")


class SlurmJob(FolderJob):
    """A Slurm job, identified by its run folder."""

    def _ask(self) -> tuple[JobState | None, str]:
        if not _NUMBER.fullmatch(self.id):  # not submitted yet, or damaged: only numbers are passed to Slurm
            return None, ""
        state, why = commands.ask(self.id)
        if state is JobState.FAILED and self._state_of_folder() is JobState.STOPPED:
            return JobState.STOPPED, why  # exit code 75 with --no-requeue
        return state, why

    def _stop(self) -> None:
        if not _NUMBER.fullmatch(self.id):
            raise ClusterError(
                f"run {self.run.name} does not know its job's number. Find it with `squeue --me`, and `scancel` it."
            )
        commands.cancel(self.id)


class SlurmLauncher:
    """Submits jobs with sbatch, from a machine that has it.

    Args:
        options: Slurm options besides nodes.
        python: the interpreter on the nodes; by default this one.
        cwd: the job's working folder; by default this process's.
    """

    def __init__(self, options: SlurmOptions, *, python: str = sys.executable, cwd: Path | None = None) -> None:
        self.options, self.python, self.cwd = options, python, cwd or Path(os.getcwd())

    def script(self, spec: JobSpec, run: RunDir, tasks: int | None = None, sha256: Sequence[str] | None = None) -> str:
        """The batch script as it would be submitted; if `tasks` is not None, of an array of as many runs.

        Args:
            sha256: checksums of job.json from `write_spec`, one per task; zeros stand for files not written yet.
        """
        known = sha256 or ["0" * 64] * (tasks or 1)
        return render(spec, self.options, run.path, python=self.python, cwd=self.cwd, tasks=tasks, sha256=known)

    def submit(self, spec: JobSpec, run: RunDir) -> SlurmJob:
        """Submit a job.

        Raises:
            UsageError: Slurm refuses the job, with its reason in one line.
        """
        self.script(spec, run)  # refuses invalid values before any file is written
        script = self.script(spec, run, sha256=[write_spec(run, spec, launcher="slurm", cwd=str(self.cwd))])
        note_submitted(run, id=self._send(script, run))
        return SlurmJob(run)

    def _send(self, script: str, run: RunDir) -> str:
        """Submit a script, keeping a copy in the run's folder; returns the job's number."""
        write_whole(run.path / "job" / "script.sh", script)
        number = commands.submit(script, self.options.export)
        commands.refuse_if_never(number)
        return number

    def submit_all(self, spec: JobSpec, sweep: Sequence[Sequence[tuple[str, str]]], run: RunDir) -> list[SlurmJob]:
        """Submit one array with a run for each element of `sweep`, whose keys and values become arguments of the program.

        Raises:
            UsageError: Slurm refuses the job, with its reason in one line.
        """
        self.script(spec, run, len(sweep))
        tasks = [RunDir(run.path / "tasks" / str(n)) for n in range(len(sweep))]
        private_folder(run.path / "tasks")
        sha256 = []
        for task, values in zip(tasks, sweep, strict=True):
            private_folder(task.path)
            task.checkpoints.mkdir()
            task.dumps.mkdir()
            args = [*spec.args, *(word for key, value in values for word in (f"--{key}", value))]
            one, pairs = replace(spec, args=args), [list(pair) for pair in values]
            sha256.append(write_spec(task, one, launcher="slurm", cwd=str(self.cwd), sweep=pairs))
        number = self._send(self.script(spec, run, len(sweep), sha256), run)
        for n, task in enumerate(tasks):
            note_submitted(task, id=f"{number}_{n}")
        return [SlurmJob(task) for task in tasks]
