"""The laboratory is what it says: separate hosts, and a controller that knows when one dies."""

from __future__ import annotations

import pytest

from tests.slurm.conftest import NODES, UP, Cluster


@pytest.mark.full
def test_the_nodes_are_as_many_hosts(slurm: Cluster) -> None:
    said = slurm.command("srun", f"-N{NODES}", "bash", "-c", "echo $SLURM_NODEID $(hostname) $(hostname -I)")
    rows = sorted(line.split() for line in said.splitlines())
    assert [(row[0], row[1]) for row in rows] == [(str(i), f"node{i + 1}") for i in range(NODES)]
    assert len({row[2] for row in rows}) == NODES


@pytest.mark.full
def test_a_second_start_finds_the_first(slurm: Cluster) -> None:
    assert "already up" in slurm.lab(*UP).stderr
