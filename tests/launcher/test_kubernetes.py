"""The template for Kubernetes: valid by the published schema; and its two pods, run as processes."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import clean_environment, ends_of
from tests.kit import forked

TEMPLATE = Path(__file__).resolve().parents[2] / "examples" / "kubernetes.yaml"
SCRIPT = """
import sys
from pathlib import Path
import torch, torch.distributed as dist, echelon as ech
ech.init_from_env()
total = torch.tensor(float(ech.RankInfo().rank))
dist.all_reduce(total)
Path(sys.argv[1], f"rank{ech.RankInfo().rank}").write_text(str(total.item()))
"""


def _manifests() -> tuple[dict[str, Any], dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(TEMPLATE.read_text())
    return service, job


@pytest.mark.full
def test_the_template_is_valid_and_names_agree() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    service, job = _manifests()
    for manifest in (service, job):
        validator.validate(manifest, validator.latest_version(), strict=True)
    with pytest.raises(validator.ValidationError):  # it does look
        validator.validate({**job, "spec": {**job["spec"], "completion": 2}}, validator.latest_version(), strict=True)
    pod = job["spec"]["template"]["spec"]
    name = service["metadata"]["name"]
    assert name == pod["subdomain"] == job["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    command = pod["containers"][0]["command"]
    assert f"--master-addr={name}-0.{name}" in command
    assert f"--nnodes={job['spec']['completions']}" in command and job["spec"]["completions"] == job["spec"]["parallelism"]
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.full
def test_two_pods_run_as_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    name = "gpt-7"
    changed = {f"{name}-0.{name}": "localhost", "29500": str(port), "--nproc-per-node=4": "--nproc-per-node=1"}
    changed |= {"/app/train.py": str(tmp_path / "train.py")}
    (container,) = _manifests()[1]["spec"]["template"]["spec"]["containers"]
    assert [each["name"] for each in container["env"]] == ["NODE_RANK"]
    pods = []
    for node in (1, 0):  # in any order
        words = container["command"][1:]
        for old, new in {**changed, "$(NODE_RANK)": str(node)}.items():
            words = [word.replace(old, new) for word in words]
        command = [sys.executable, "-m", "torch.distributed.run", *words, str(tmp_path)]
        pods.append(forked.popen(command, cwd=tmp_path, env=clean_environment()))
    assert ends_of(pods) == [0, 0]
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["1.0", "1.0"]
