"""A job on Kubernetes: the manifests of an Indexed Job as text, and what each of its pods runs.

`render` asks nobody and writes nothing: what it returns goes to `kubectl apply`. Each pod is a node, in which this module
runs the launcher of a node, as `srun` does on a cluster. The pods find one another by the names that a headless Service gives
them, and need a volume that all of them can write, on which the run's folder is.
A pod that fails, or is evicted, ends the job; one that is applied again resumes in the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from echelon.common.errors import ClusterError, EchelonError, require
from echelon.common.hash_seed import fix_hash_seed
from echelon.common.terminal import say
from echelon.contracts.records import exit_record
from echelon.contracts.run_dir import RunDir, read_json
from echelon.launcher.cluster.conclude import conclude, refuse
from echelon.launcher.cluster.node import run_node, start_of
from echelon.launcher.job import JobSpec, cores_of_a_rank
from echelon.launcher.local.output import forgive_output
from echelon.launcher.protocol import FolderJob, JobState, write_spec

__all__ = ["KubernetesJob", "main", "render"]

_IN_POD = ["python", "-P", "-m", "echelon.launcher.cluster.kubernetes"]
_PATIENCE_S = 600.0  # until the last pod has a place and a name: images are large
_LAST_EXIT_S = 60.0
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")  # of a Service, and with an index of a pod


def render(
    spec: JobSpec,
    name: str,
    *,
    image: str,
    volume: str,
    cpus_per_rank: int | None = None,
    gpus: int | None = None,
    mem: str | None = None,
) -> str:
    """The Service and the Job, as YAML documents that are JSON.

    Args:
        spec: its target is a path or a module in the image. Its arguments are in the text: no secrets.
        name: of the run, the Job and the Service.
        volume: "CLAIM:PATH": a PersistentVolumeClaim that many pods can write (ReadWriteMany), and where they see it. The run's
            folder is PATH/runs/NAME.
        gpus, mem: of each pod; memory in Slurm's words, such as "64G", of which Kubernetes' are "64Gi".
    Raises:
        UsageError: a name, a volume or an amount of memory that cannot be.
    """
    claim, _, path = volume.partition(":")
    if not _NAME.fullmatch(name):
        raise ClusterError(
            f"--name must be at most 52 of a-z 0-9 -, begin with a letter and not end with -, for Kubernetes, got {name!r}."
        )
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", claim) or not PurePosixPath(path).is_absolute():
        raise ClusterError(
            f"--volume must be CLAIM:PATH, a claim that all pods can write and its absolute path there, got {volume!r}."
        )
    run, label = str(PurePosixPath(path) / "runs" / name), "batch.kubernetes.io/"
    resources = _resources((cpus_per_rank or cores_of_a_rank(gpus)) * spec.ranks, gpus, mem)
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(spec.grace_s) + 30,
        "containers": [_container(spec, name, image, path, run, f"metadata.labels['{label}controller-uid']", resources)],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # what data workers share; the default is 64 MB
        ],
    }
    job = {"completionMode": "Indexed", "completions": spec.nodes, "parallelism": spec.nodes, "backoffLimit": 0}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {f"{label}job-name": name}}
    head: dict[str, object] = {"metadata": {"name": name}}
    manifests = [
        {"apiVersion": "v1", "kind": "Service", **head, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", **head, "spec": {**job, "template": {"spec": pod}}},
    ]
    return "---\n".join(json.dumps(manifest, indent=2) + "\n" for manifest in manifests)


def _resources(cpus: int, gpus: int | None, mem: str | None) -> dict[str, object]:
    """Of a pod, in Kubernetes' words."""
    amount = re.fullmatch(r"(\d+)([KMGT]?)", mem) if mem is not None else None
    require(mem is None or amount is not None, "--mem", "a number followed by K, M, G or T", mem, kind=ClusterError)
    resources: dict[str, object] = {"cpu": str(cpus)}
    if amount:
        resources["memory"] = f"{amount[1]}{amount[2] or 'M'}i"
    if gpus:
        resources["nvidia.com/gpu"] = str(gpus)
    return resources


def _container(
    spec: JobSpec, name: str, image: str, path: str, run: str, uid: str, resources: dict[str, object]
) -> dict[str, object]:
    return {
        "name": "node",
        "image": image,
        "command": [*_IN_POD, run, f"{name}-{{}}.{name}", json.dumps(asdict(spec))],
        "env": [{"name": "JOB_UID", "valueFrom": {"fieldRef": {"fieldPath": uid}}}],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "shared", "mountPath": path}, {"name": "memory", "mountPath": "/dev/shm"}],
    }


class KubernetesJob(FolderJob):
    """The state as the folder shows it, which cannot distinguish a running job from a deleted one."""

    def _ask(self) -> tuple[JobState | None, str]:
        ended = self.attempts and exit_record(self.attempts[-1] / "exit.json") is not None
        return (None, "") if ended else (JobState.RUNNING, f"or gone: kubectl get job {self.run.name}")

    def _stop(self) -> None:
        raise ClusterError(f"echelon does not talk to Kubernetes itself. Run: kubectl delete job {self.run.name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run this pod's node; the first pod concludes for all. The exit code is 75 if applying again would continue the run."""
    parser = argparse.ArgumentParser(prog="python -m echelon.launcher.cluster.kubernetes")
    parser.add_argument("run", type=Path, help="the run's folder, on a volume that all pods see")
    parser.add_argument("host", help="the name of a pod, with {} for its index")
    parser.add_argument("spec", type=json.loads, help="what to run")
    arguments = parser.parse_args(argv)
    os.umask(0o077)
    spec, index = JobSpec(**arguments.spec), os.environ.get("JOB_COMPLETION_INDEX", "")
    if not index.isascii() or not index.isdigit() or int(index) >= spec.nodes or not os.environ.get("JOB_UID"):
        say(
            f"JOB_COMPLETION_INDEX must be a number below {spec.nodes}, and JOB_UID the Job's uid, got {index!r} and "
            f"{os.environ.get('JOB_UID')!r}. Both are set by the manifest that `echelon submit` writes: apply it unchanged."
        )
        return 2
    node = int(index)
    hosts = [arguments.host.replace("{}", str(index)) for index in range(spec.nodes)]
    # What Slurm tells the launcher of a node. A Job that is applied again has another uid.
    env = {"SLURM_JOB_ID": os.environ["JOB_UID"], "SLURM_STEP_NODELIST": ",".join(hosts), "SLURM_NODEID": str(node)}
    run, start = RunDir(arguments.run), start_of(env)
    try:
        if node == 0:
            run = RunDir.create(run.path.parent, run.name, begin=False)
            run.hold(job=start, patience_s=_LAST_EXIT_S)  # the pods before these may still be ending
            # Only shown: what runs came with the manifest, and the claim may be mounted for everybody to write.
            write_spec(run, spec, launcher="kubernetes", id=env["SLURM_JOB_ID"], cwd=os.getcwd(), decides=False)
        said = run.path / "job" / "job.json"
        _until(lambda: (read_json(said) or {}).get("id") == env["SLURM_JOB_ID"], f"{hosts[0]} to write {said}: do all see it?")
        _until(lambda: _has_address(hosts[min(1, spec.nodes - 1)]), f"{hosts[min(1, spec.nodes - 1)]} to have an address")
        code = run_node(run, env, start=start, given=spec)
    except EchelonError as error:
        say(str(error))
        code = 1
        if (run.path / "job").is_dir():
            refuse(run, start, node, str(error))
    return code if node else _last_word(run, spec, code, start)


def _last_word(run: RunDir, spec: JobSpec, code: int, start: str) -> int:
    """As of the batch script on a cluster: all nodes' ends have been written, or will not be."""
    newest = (run.attempts() or [run.attempt_path])[-1]
    until = time.monotonic() + _LAST_EXIT_S
    while any(exit_record(newest / f"exit.node{n}.json") is None for n in range(1, spec.nodes)) and time.monotonic() < until:
        time.sleep(0.1)
    return conclude(run, code, start, given=spec)


def _until(probe: Any, what: str) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not probe():
        if time.monotonic() > until:
            raise EchelonError(f"waited {_PATIENCE_S:g} s for {what}.")
        time.sleep(0.2)


def _has_address(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, 9))
    except OSError:
        return False


if __name__ == "__main__":
    fix_hash_seed()
    forgive_output()
    sys.exit(main())
