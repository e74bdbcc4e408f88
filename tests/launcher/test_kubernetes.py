"""What `echelon submit --to kubernetes --dry-run` prints: valid by the published schema; and two of its pods, as processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.common.errors import ClusterError
from echelon.contracts.run_dir import RunDir, read_json
from echelon.launcher.cluster import kubernetes
from echelon.launcher.cluster.jobs import job_of
from echelon.launcher.protocol import JobState
from tests.conftest import clean_environment, ends_of
from tests.kit import forked
from tests.kit.refusals import refused

SUBMIT = ("submit", "--to", "kubernetes", "--dry-run", "--name", "gpt-7", "--image", "registry/gpt:7", "--nodes", "2")

SCRIPT = """
import os, sys
import torch, torch.distributed as dist, echelon as ech
ech.init_from_env()
total = torch.tensor(float(ech.RankInfo().rank))
dist.all_reduce(total)
if sys.argv[1] == str(ech.RankInfo().rank):
    raise ValueError("planted")
print("sum", total.item(), flush=True)
"""


def _manifests(echelon_command: Any, volume: str, *words: str) -> list[dict[str, Any]]:
    said = echelon_command(*SUBMIT, "--volume", volume, *words)
    assert said.returncode == 0, said.stderr
    return [json.loads(part) for part in said.stdout.split("---\n")]


@pytest.mark.full
def test_the_manifests_are_valid_and_say_what_was_asked_for(echelon_command: Any) -> None:
    yaml = pytest.importorskip("yaml")
    validator = pytest.importorskip("kubernetes_validate")
    shape = ("--ranks-per-node", "4", "--gpus-per-node", "4", "--cpus-per-rank", "8", "--mem", "64G")
    said = echelon_command(*SUBMIT, "--volume", "shared:/data", *shape, "/app/train.py", "--lr", "a'b\"c\n$(x)")
    service, job = yaml.safe_load_all(said.stdout)
    for manifest in (service, job):
        validator.validate(manifest, validator.latest_version(), strict=True)
    with pytest.raises(validator.ValidationError):  # it does look
        validator.validate({**job, "spec": {**job["spec"], "completion": 2}}, validator.latest_version(), strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (2, 2, "Indexed")
    assert service["metadata"]["name"] == pod["subdomain"] == job["metadata"]["name"] == "gpt-7"
    assert container["resources"]["limits"] == {"cpu": "32", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert container["command"][4:6] == ["/data/runs/gpt-7", "gpt-7-{}.gpt-7"]
    assert json.loads(container["command"][6])["args"] == ["--lr", "a'b\"c\n$(x)"]


@pytest.mark.full
@pytest.mark.parametrize("fails", [None, 1])
def test_two_pods_run_as_processes(echelon_command: Any, tmp_path: Path, fails: int | None) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    _, job = _manifests(echelon_command, f"shared:{tmp_path}", str(tmp_path / "train.py"), str(fails))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = [
        sys.executable if word == "python" else word.replace("gpt-7-{}.gpt-7", "localhost") for word in container["command"]
    ]
    assert [each["name"] for each in container["env"]] == ["JOB_UID"]
    env = {**clean_environment(), "JOB_UID": "7f3a"}
    with open(tmp_path / "said", "w") as said:
        pods = [
            forked.popen(
                command,
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**env, "JOB_COMPLETION_INDEX": str(n)},
            )
            for n in (1, 0)  # in any order
        ]
        codes = ends_of(pods)
    text, run = (tmp_path / "said").read_text(), RunDir(tmp_path / "runs" / "gpt-7")
    ended = read_json(run.exit_json) or {}
    found = job_of(run)
    if fails is None:
        assert codes == [0, 0], text
        assert [found.log(rank).read_text() for rank in range(2)] == ["sum 1.0\n"] * 2
        assert found.state() is JobState.DONE and ended["exit_code"] == 0
    else:
        assert all(codes) and "rank 1 failed first" in text and "ValueError: planted" in text
        assert found.state() is JobState.FAILED and ended["first_failure"]["rank"] == 1
    with refused(ClusterError):
        found.cancel()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--to", "kubernetes", "train.py"), "kubectl apply -f -"),
        ((*SUBMIT, "train.py"), "needs --volume"),
        ((*SUBMIT, "--volume", "shared", "train.py"), "CLAIM:PATH"),
        ((*SUBMIT, "--volume", "a:/b", "--name", "Upper", "train.py"), "--name must be at most 52 of a-z 0-9 -"),
        (
            (*SUBMIT, "--volume", "a:/b", "--mem", "much", "train.py"),
            "--mem must be a number followed by K, M, G or T, got 'much'",
        ),
        ((*SUBMIT, "--volume", "a:/b", "--partition", "gpu", "train.py"), "--partition is for Slurm"),
    ],
)
def test_what_cannot_be_is_refused(echelon_command: Any, words: tuple[str, ...], reason: str) -> None:
    said = echelon_command(*(words if words[0] == "submit" else ("submit", *words)))
    assert said.returncode == 2 and reason in said.stderr and not said.stdout


@pytest.mark.parametrize(("index", "uid"), [("x", "1"), ("2", "1"), ("-1", "1"), (None, "1"), ("0", None)])
def test_variables_that_a_job_sets_are_named_where_they_are_wrong(
    monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path, index: str | None, uid: str | None
) -> None:
    for name, value in (("JOB_COMPLETION_INDEX", index), ("JOB_UID", uid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    spec = json.dumps({"target": "train.py", "nodes": 2})
    assert kubernetes.main([str(tmp_path / "run"), "host-{}", spec]) == 2
    assert "JOB_COMPLETION_INDEX must be a number below 2" in capfd.readouterr().err
