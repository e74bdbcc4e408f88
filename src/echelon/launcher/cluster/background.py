"""A job on this machine that outlives the command that submitted it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from echelon.common.errors import ClusterError
from echelon.common.files import open_to_append
from echelon.common.machine import boot_id, started_at
from echelon.contracts.records import exit_record
from echelon.contracts.run_dir import RunDir
from echelon.launcher.job import JobSpec
from echelon.launcher.local.processes import signal_if
from echelon.launcher.protocol import FolderJob, JobState, note_submitted, write_spec

__all__ = ["LocalJob", "LocalLauncher"]

_PID = re.compile(r"[1-9][0-9]{0,9}")


class LocalJob(FolderJob):
    """A job whose launcher is a process of this machine, identified by its pid and start time."""

    def _ask(self) -> tuple[JobState | None, str]:
        host = str(self.said.get("host", ""))
        if host not in ("", socket.gethostname()) and not self._has_ended():
            return JobState.RUNNING, f"or ended: ask on {host}, where it was started"
        return (JobState.RUNNING, "") if self._process() is not None else (None, "")

    def _has_ended(self) -> bool:
        return bool(self.attempts) and exit_record(self.attempts[-1] / "exit.json") is not None

    def _process(self) -> int | None:
        """The launcher's process id, if it still runs and the number does not belong to another process."""
        if not _PID.fullmatch(self.id):
            return None
        pid = int(self.id)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # a child of this very process would stay a zombie
        began = started_at(pid)
        return pid if began is not None and (self.said.get("boot"), self.said.get("ticks")) == (boot_id(), began) else None

    def _stop(self) -> None:
        host = str(self.verified().get("host", ""))
        if host not in ("", socket.gethostname()):
            raise ClusterError(f"job {self.id} runs on {host}. Cancel it there.")
        if not _PID.fullmatch(self.id):
            return
        signal_if(int(self.id), signal.SIGTERM, lambda _: self._process() is not None)


class LocalLauncher:
    """Starts jobs in the background on this machine, in sessions of their own.

    Args:
        cwd: the job's working folder; by default this process's.
    Attributes:
        name: the launcher's name in the job's folder.
        program: the module that runs a job, given the job's folder.
    """

    name, program = "local", "echelon.launcher.cluster.node"

    def __init__(self, *, cwd: Path | None = None) -> None:
        self.cwd = cwd or Path(os.getcwd())

    def check(self, spec: JobSpec) -> None:
        """Check that a job can run here.

        Raises:
            UsageError: it cannot.
        """
        if spec.nodes != 1:
            raise ClusterError(f"--nodes must be 1 on this machine, got {spec.nodes}. For a cluster, submit with --to slurm.")

    def submit(self, spec: JobSpec, run: RunDir) -> LocalJob:
        self.check(spec)
        written = write_spec(run, spec, launcher=self.name, cwd=str(self.cwd))
        output = open_to_append(run.path / "job" / "output.log")
        foreign = ("SLURM_", "ECHELON_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(foreign) or k == "ECHELON_OVERRIDES"}
        call = ["--call-sha256", spec.sha256] if spec.kind == "call" and spec.sha256 else []
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.program, str(run.path.absolute()), "--spec-sha256", written, *call],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
                umask=0o077,  # as in the batch script
            )
        finally:
            os.close(output)
        process.returncode = 0  # it outlives this process: suppresses the warning that it was not waited for
        where = {"host": socket.gethostname(), "boot": boot_id(), "ticks": started_at(process.pid)}
        note_submitted(run, id=str(process.pid), **where)
        return LocalJob(run)
