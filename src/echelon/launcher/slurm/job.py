"""A job on Slurm: submitted, asked for, cancelled."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echelon.contracts.run_dir import RunDir
from echelon.launcher.job import JobSpec
from echelon.launcher.protocol import FolderJob, JobState, update_spec, write_atomically, write_spec
from echelon.launcher.slurm import commands
from echelon.launcher.slurm.render import SlurmOptions, render

__all__ = ["SlurmJob", "SlurmLauncher"]


class SlurmJob(FolderJob):
    """A job of Slurm's, by its run folder."""

    def _ask(self) -> tuple[JobState | None, str]:
        state, why = commands.ask(self.id)
        if state is JobState.FAILED and self._state_of_folder() is JobState.STOPPED:
            return JobState.STOPPED, why  # exit code 75, and --no-requeue
        return state, why

    def _stop(self) -> None:
        commands.cancel(self.id)


class SlurmLauncher:
    """Submits by sbatch, from a machine that has it.

    Args:
        options: what Slurm is asked for besides nodes.
        python: the interpreter on the nodes; by default this one.
        cwd: where the job runs; by default here.
    """

    def __init__(self, options: SlurmOptions, *, python: str = sys.executable, cwd: Path | None = None) -> None:
        self.options, self.python, self.cwd = options, python, cwd or Path(os.getcwd())

    def script(self, spec: JobSpec, run: RunDir, tasks: int | None = None) -> str:
        """The batch script, as it would be submitted; of an array of `tasks` runs if that is not None."""
        return render(spec, self.options, run.path, python=self.python, cwd=self.cwd, tasks=tasks)

    def submit(self, spec: JobSpec, run: RunDir) -> SlurmJob:
        """
        Raises:
            UsageError: Slurm refuses the job; its own reason in one line.
        """
        script = self.script(spec, run)
        write_spec(run, spec, launcher="slurm", cwd=str(self.cwd))
        write_atomically(run.path / "job" / "script.sh", script)
        number = commands.submit(script, self.options.export)
        commands.refuse_if_never(number)
        update_spec(run, id=number)
        return SlurmJob(run)

    def submit_all(self, spec: JobSpec, sweep: Sequence[Sequence[tuple[str, str]]], run: RunDir) -> list[SlurmJob]:
        """Submit one array: a run for each element of `sweep`, whose keys and values become arguments of the program.

        Raises:
            UsageError: Slurm refuses the job; its own reason in one line.
        """
        script = self.script(spec, run, len(sweep))
        write_atomically(run.path / "job" / "script.sh", script)
        tasks = [RunDir(run.path / "tasks" / str(n)) for n in range(len(sweep))]
        for task, values in zip(tasks, sweep, strict=True):
            task.checkpoints.mkdir(parents=True)
            task.dumps.mkdir()
            args = [*spec.args, *(word for key, value in values for word in (f"--{key}", value))]
            write_spec(task, replace(spec, args=args), launcher="slurm", cwd=str(self.cwd), sweep=[list(v) for v in values])
        number = commands.submit(script, self.options.export)
        commands.refuse_if_never(number)
        for n, task in enumerate(tasks):
            update_spec(task, id=f"{number}_{n}")
        return [SlurmJob(task) for task in tasks]
