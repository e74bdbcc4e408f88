"""A job on this machine that outlives the command which submitted it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from echelon.contracts.errors import UsageError
from echelon.contracts.run_dir import RunDir
from echelon.launcher.job import JobSpec
from echelon.launcher.protocol import FolderJob, JobState, update_spec, write_spec

__all__ = ["LocalJob", "LocalLauncher"]


class LocalJob(FolderJob):
    """A job whose launcher is a process of this machine: its id is the process's, and when that began."""

    def _ask(self) -> tuple[JobState | None, str]:
        return (JobState.RUNNING, "") if self._process() is not None else (None, "")

    def _process(self) -> int | None:
        """The process id while the launcher lives, and not another process that was given the same number."""
        import psutil  # type: ignore[import-untyped,unused-ignore]  # here: few need it

        pid = int(self.id)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # of this very process: else it would be a zombie for ever
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == self.said["began"] and process.status() != psutil.STATUS_ZOMBIE:
                return pid
        return None

    def _stop(self) -> None:
        pid = self._process()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


class LocalLauncher:
    """Starts jobs in the background on this machine, in sessions of their own.

    Args:
        cwd: where the job runs; by default here.
    Attributes:
        name: of the launcher, in the job's folder.
        program: the module that runs a job, given its folder.
    """

    name, program = "local", "echelon.launcher.node"

    def __init__(self, *, cwd: Path | None = None) -> None:
        self.cwd = cwd or Path(os.getcwd())

    def check(self, spec: JobSpec) -> None:
        """
        Raises:
            UsageError: a job that cannot run here.
        """
        if spec.nodes != 1:
            raise UsageError(f"--nodes {spec.nodes}: this machine is one. Submit to a cluster, with --to slurm.")

    def submit(self, spec: JobSpec, run: RunDir) -> LocalJob:
        import psutil  # type: ignore[import-untyped,unused-ignore]

        self.check(spec)
        write_spec(run, spec, launcher=self.name, cwd=str(self.cwd))
        output = os.open(run.path / "job" / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        foreign = ("SLURM_", "ECHELON_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(foreign) or k == "ECHELON_OVERRIDES"}
        call = ["--call-sha256", spec.sha256] if spec.sha256 else []
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.program, str(run.path.absolute()), *call],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
                umask=0o077,  # as the batch script has it
            )
        finally:
            os.close(output)
        process.returncode = 0  # it outlives us: no warning that it was not waited for
        update_spec(run, id=str(process.pid), began=psutil.Process(process.pid).create_time())
        return LocalJob(run)
