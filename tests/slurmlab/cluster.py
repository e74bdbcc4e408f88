"""What a test does with a laboratory: commands, questions, waiting, and accidents."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
UNFINISHED = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT"}


class Cluster:
    """The laboratory in a folder, through the ordinary commands of Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "etc" / "slurm.conf"

    def own_environment(self) -> dict[str, str]:
        """Of this process, without what Slurm put there."""
        return {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_", "SALLOC_"))}

    @property
    def env(self) -> dict[str, str]:
        """The environment of a login node."""
        return {**self.own_environment(), "SLURM_CONF": str(self.conf)}

    def lab(self, *words: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
        """A command of the laboratory's own, in a process that leaves the daemons to init: the caller is not their parent."""
        return subprocess.run(
            [sys.executable, "-m", HERE.name, "--dir", str(self.folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=HERE.parent,
            env=self.own_environment(),
        )

    def command(self, *words: object, check: bool = True, timeout_s: float = 60, **options: Any) -> str:
        """Standard output of a command of Slurm's."""
        ended = subprocess.run(
            [str(w) for w in words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.env,
            **options,
        )
        assert not check or ended.returncode == 0, f"{words}: {ended.returncode}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def info(self, job: str) -> dict[str, str]:
        """What the controller knows of a job. Values with blanks come out cut."""
        out = self.command("scontrol", "-o", "show", "job", job)
        pairs = [word.split("=", 1) for word in out.splitlines()[0].split() if "=" in word]
        known: dict[str, str] = {}
        for key, value in pairs:
            if key != "NodeList" or value != "(null)":  # ReqNodeList and others have their own keys
                known.setdefault(key, value)
        return known

    def wait(self, job: str, *states: str, timeout_s: float = 60) -> str:
        """Until the job is in one of `states`, by default: has ended. The state."""
        return (
            self.until(
                lambda: (state := self.info(job)["JobState"]) in states or ((not states and state not in UNFINISHED) and state),
                f"job {job} to be {states or 'ended'}",
                timeout_s,
            )
            and self.info(job)["JobState"]
        )

    def until(self, probe: Callable[[], Any], what: str = "it", timeout_s: float = 60) -> Any:
        end = time.monotonic() + timeout_s
        while True:
            if value := probe():
                return value
            assert time.monotonic() < end, f"waited {timeout_s:g} s for {what}"
            time.sleep(0.1)

    def nodes_of(self, job: str) -> list[str]:
        return self.command("scontrol", "show", "hostnames", self.info(job)["NodeList"]).split()

    def expire(self, job: str, seconds: int) -> None:
        """Let the job's time end in so many seconds. The controller looks at the limits every 30 s."""
        self.command("scontrol", "update", f"jobid={job}", f"EndTime=now+{seconds}seconds")

    def fail_node(self, name: str) -> None:
        """A node dies and the controller knows at once, instead of after SlurmdTimeout."""
        self.lab("node", name, "kill")
        self.command("scontrol", "update", f"nodename={name}", "state=down", "reason=test")
