"""`slurm`: a real Slurm of eight nodes on this machine, each in network namespaces of its own; up in half a second.

Without Slurm's packages, or without root, these tests are skipped and say how to get them; with ECHELON_REQUIRE_SLURM=1 they
fail instead. The daemons are started by a process of their own, which leaves them to init: no test is their parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import clean_environment

LAB = Path(__file__).with_name("lab.py")
# Enough that a job is preempted, another loses a node and a third is cancelled while the others run undisturbed.
NODES = 8
# With patience: how much a rank does before it is killed is not to depend on the machine.
UP = ("up", "--nodes", str(NODES), "--cpus", "8", "--kill-wait", "60")
UNFINISHED = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT"}


class Cluster:
    """The laboratory, through the ordinary commands of Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "etc" / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """The environment of a login node."""
        return {**clean_environment(), "SLURM_CONF": str(self.conf)}

    def lab(self, *words: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(LAB), "--dir", str(self.folder), *words]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, env=clean_environment()
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

    def echelon(
        self, *words: object, cwd: Path, timeout_s: float = 60, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Our command, as a user of the cluster types it."""
        return subprocess.run(
            [sys.executable, "-m", "echelon", *map(str, words)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=cwd,
            env={**self.env, **(env or {})},
        )

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

    def fail_node(self, name: str, how: str = "kill") -> None:
        """A node dies and the controller knows at once, instead of after SlurmdTimeout."""
        self.lab("node", name, how)
        self.command("scontrol", "update", f"nodename={name}", "state=down", "reason=test")


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Cluster]:
    # A short path: Slurm's and munge's sockets lie below it. Any user may enter it, as munge demands.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    cluster = Cluster(Path(tempfile.gettempdir()) / f"echelon-slurm{'-' + worker if worker else ''}")
    up = cluster.lab(*UP)
    if up.returncode == 0:
        up = cluster.lab("reset")  # jobs of a session that was killed
    if up.returncode:
        reason = f"no Slurm to test with: {(up.stderr.strip().splitlines() or ['?'])[-1]} (as root: tests/slurm/install)"
        if os.environ.get("ECHELON_REQUIRE_SLURM") == "1":
            pytest.fail(f"{reason}\n{up.stderr}")
        pytest.skip(reason)
    yield cluster
    cluster.lab("down")


@pytest.fixture
def slurm(slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Idle nodes and an empty queue; also for Slurm's commands started by this process."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    yield slurm_cluster
    slurm_cluster.lab("reset")
