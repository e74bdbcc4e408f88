"""A job on Slurm: submitted, asked for, cancelled."""

from __future__ import annotations

import os
import sys
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

    def script(self, spec: JobSpec, run: RunDir) -> str:
        return render(spec, self.options, run.path, python=self.python, cwd=self.cwd)

    def submit(self, spec: JobSpec, run: RunDir) -> SlurmJob:
        """
        Raises:
            UsageError: Slurm refuses the job; its own reason in one line.
        """
        script = self.script(spec, run)
        write_spec(run, spec, launcher="slurm", cwd=str(self.cwd))
        write_atomically(run.path / "job" / "script.sh", script)
        number = commands.submit(script, self.options.export)
        update_spec(run, id=number)
        return SlurmJob(run)
