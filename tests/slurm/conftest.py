"""`slurm`: a real Slurm of eight nodes on this machine, each in network namespaces of its own; up in half a second.

Without Slurm's packages, or without root, these tests are skipped and say how to get them; with ECHELON_REQUIRE_SLURM=1 they
fail instead. The daemons are started by a process of their own, which leaves them to init: no test is their parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests import slurmlab
from tests.conftest import clean_environment

# Enough that a job is preempted, another loses a node and a third is cancelled while the others run undisturbed.
NODES = 8
# With patience: how much a rank does before it is killed is not to depend on the machine.
UP = ("up", "--nodes", str(NODES), "--cpus", "8", "--kill-wait", "60")


class Cluster(slurmlab.Cluster):
    """The laboratory, whose login node has our command."""

    def own_environment(self) -> dict[str, str]:
        return clean_environment()

    def echelon(
        self, *words: object, cwd: Path, timeout_s: float = 300, env: Mapping[str, str] | None = None
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


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Cluster]:
    # A short path: Slurm's and munge's sockets lie below it. Any user may enter it, as munge demands.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    cluster = Cluster(Path(tempfile.gettempdir()) / f"echelon-slurm{'-' + worker if worker else ''}")
    up = cluster.lab(*UP)
    if up.returncode == 0:
        up = cluster.lab("reset")  # jobs of a session that was killed
    if up.returncode:
        reason = f"no Slurm to test with: {(up.stderr.strip().splitlines() or ['?'])[-1]} (as root: tests/slurmlab/install)"
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
