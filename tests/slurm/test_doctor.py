"""`echelon doctor` on the nodes of a real allocation: a node that is cut off is named, and the others are looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.kit.started import wait_until
from tests.slurm.conftest import Cluster

# Each rank imports torch, on as many cores as there are.
DOCTOR = f"{sys.executable} -m echelon doctor --quick --json --time-limit 5m"
SCRIPT = f"""#!/bin/bash
cd "$1"
touch begun
while [ ! -e go ]; do sleep 0.1; done
{DOCTOR} >said.json 2>told
echo $? >code.whole
mv code.whole code
"""


def _looked(slurm: Cluster, tmp_path: Path, nodes: int, cut: str = "") -> tuple[int, dict[str, object], str]:
    tmp_path.chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT)
    job = ("--no-kill", f"--nodes={nodes}", "--cpus-per-task=2", f"--output={tmp_path}/out", str(script), str(tmp_path))
    slurm.command("sbatch", "--parsable", *job)
    wait_until((tmp_path / "begun").exists, "the job runs", 600.0)
    if cut:
        slurm.lab("node", cut, "cut")
    (tmp_path / "go").touch()
    wait_until((tmp_path / "code").exists, "the doctor ends", 600.0)
    return int((tmp_path / "code").read_text()), json.loads((tmp_path / "said.json").read_text()), (tmp_path / "told").read_text()


@pytest.mark.full
def test_all_nodes_of_an_allocation(slurm: Cluster, tmp_path: Path) -> None:
    code, said, told = _looked(slurm, tmp_path, 2)
    rows = {row["name"]: row for row in said["rows"]}  # type: ignore[attr-defined,index]
    assert code == 0 and said["ok"] is True, rows
    assert rows["ranks"]["said"] == "2 of 2 ranks answer, on 2 hosts"
    assert rows["all-reduce"]["said"].startswith("gloo: exact on 2 ranks") and "between hosts" in rows["bandwidth"]["said"]
    assert "looking at 2 nodes, 1 rank on each" in told


@pytest.mark.full
def test_a_node_that_is_cut_off_is_named_and_the_others_are_looked_at(slurm: Cluster, tmp_path: Path) -> None:
    code, said, told = _looked(slurm, tmp_path, 3, cut="node2")
    rows = {row["name"]: row for row in said["rows"]}  # type: ignore[attr-defined,index]
    assert code == 1 and rows["ranks"]["state"] == "fail" and list(said["silent"]) == ["node2"], rows  # type: ignore[call-overload]
    assert rows["ranks"]["said"].startswith("2 of 3 ranks answer, on 2 hosts. Without an answer: node2: ")
    assert rows["all-reduce"]["said"].startswith("gloo: exact on 2 ranks")
    assert "no answer from node2; asking the others without it" in told
