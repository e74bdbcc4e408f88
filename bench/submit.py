"""Seconds from the command that submits a job to Slurm until all ranks have finished their first step.

echelon    `echelon submit`
submitit   a function on each node that runs torchrun, as its users write it
nntool     `slurm_fn` of slurmic, which nntool uses, with torchrun as its launch command. One node only: with several, it starts
           the command on the first, and waits.

All three run this file as the ranks' program: a small model in DDP on gloo, one SGD step. The cluster is that of the
tests (tests/slurmlab/install, as root); it is set up once and idle. All processes share one monotonic clock. Each command
is a new process, as when it is typed. All figures include the time that Slurm itself needs to start a job.

    python bench/submit.py [--rounds N] [--ranks-per-node 2] [--nodes 1 2] [--json]

Target: at most 0.8 of the better peer. Needs `pip install submitit==1.5.4 slurmic==0.2.1`; a peer that is missing is left out.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _timing import emit, installed, machine, median, options, spread, versions

TARGET = 0.8
LIMIT_S = 120.0
TESTS = Path(__file__).resolve().parents[1] / "tests"  # where the package slurmlab is
LAUNCHERS = ("echelon", "submitit", "nntool")
MODULES = {"echelon": "echelon", "submitit": "submitit", "nntool": "slurmic"}

# --- the ranks' program


def rank_program(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    (folder / f"stepped.{dist.get_rank()}").write_text(repr(time.monotonic()))
    dist.destroy_process_group()


# --- the programs that submit, each in a process of its own

_SUBMITIT = """
import os, socket, subprocess, sys
import submitit

def node(program, folder, ranks):
    environment = submitit.JobEnvironment()
    first = subprocess.run(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], capture_output=True, text=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(environment.num_nodes), "--nproc-per-node", ranks,
               "--node-rank", str(environment.node), "--master-addr", first.stdout.split()[0], "--master-port", "29511"]
    subprocess.run([*command, program, "--as-rank", folder], check=True)

if __name__ == "__main__":
    program, folder, nodes, ranks = sys.argv[1:]
    executor = submitit.SlurmExecutor(folder=folder + "/submitit")
    executor.update_parameters(nodes=int(nodes), ntasks_per_node=1, cpus_per_task=int(ranks), partition="batch", time=5)
    print(executor.submit(node, program, folder, ranks).job_id)
"""

# On one node, the most that it can start on. It always calls nvidia-smi on the node; `cluster` provides one.
_NNTOOL = """
import subprocess, sys
from slurmic import SlurmConfig, slurm_fn

@slurm_fn
def main(folder):
    sys.path.insert(0, {bench!r})
    from pathlib import Path
    from submit import rank_program
    rank_program(Path(folder))

if __name__ == "__main__":
    folder = sys.argv[1]
    command = ("{python} -m torch.distributed.run --nnodes {{num_machines}} --nproc-per-node {ranks} "
               "--node-rank {{machine_rank}} --master-addr {{main_process_ip}} --master-port {{main_process_port}} {file}")
    config = SlurmConfig(mode="slurm", partition="batch", job_name="bench", tasks_per_node=1, cpus_per_task={ranks},
                         processes_per_task={ranks}, timeout_min=5, output_parent_path=folder, use_distributed_env=True,
                         distributed_launch_command=command)
    main[config](folder)
"""


def command_of(launcher: str, folder: Path, nodes: int, ranks: int) -> list[str]:
    this = str(Path(__file__).resolve())
    if launcher == "echelon":
        where = ["--nodes", str(nodes), "--ranks-per-node", str(ranks), "--partition", "batch", "--time", "5m"]
        return [sys.executable, "-m", "echelon", "submit", *where, "--runs", f"{folder}/runs", this, "--as-rank", str(folder)]
    program = folder / "program.py"
    if launcher == "submitit":
        program.write_text(_SUBMITIT)
        return [sys.executable, str(program), this, str(folder), str(nodes), str(ranks)]
    filled = _NNTOOL.format(bench=str(Path(this).parent), python=shlex.quote(sys.executable), ranks=ranks, file=program)
    program.write_text(filled)
    return [sys.executable, str(program), str(folder)]


# --- the process that measures


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of the login node of an idle cluster."""
    lab = [sys.executable, "-m", "slurmlab", "--dir", str(folder)]
    subprocess.run([*lab, "up"], cwd=TESTS, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    stub = folder / "bin" / "nvidia-smi"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\nexit 0\n")
    stub.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ECHELON_", "SLURM_"))}
    path = os.pathsep.join([str(stub.parent), str(Path(sys.executable).parent), kept["PATH"]])
    try:
        yield {**kept, "PATH": path, "SLURM_CONF": str(folder / "etc" / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    finally:
        subprocess.run([*lab, "down"], cwd=TESTS, check=True, stdin=subprocess.DEVNULL)


def measure(launcher: str, nodes: int, ranks: int, environment: dict[str, str]) -> float | None:
    """Seconds of one job; None if its ranks made no step within two minutes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = command_of(launcher, folder, nodes, ranks)
        started = time.monotonic()
        said = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        while len(done := list(folder.glob("stepped.*"))) < nodes * ranks and time.monotonic() - started < LIMIT_S:
            time.sleep(0.1)
        if len(done) < nodes * ranks:
            sys.stderr.write(f"{launcher} did not train: {said.stderr[-2000:]}\n")
            subprocess.run(["scancel", "--user", "root"], env=environment, check=False)
        until = time.monotonic() + 30
        while _queue(environment) and time.monotonic() < until:  # each job starts on an idle cluster
            time.sleep(0.2)
        time.sleep(1.0)  # Slurm frees the nodes a little later; a job submitted at once would wait a second for its next check
        return max(float(path.read_text()) for path in done) - started if len(done) == nodes * ranks else None


def _queue(environment: dict[str, str]) -> str:
    return subprocess.run(["squeue", "--noheader"], env=environment, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = options(__doc__, rounds=5)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--as-rank", metavar="FOLDER", help="for this script itself: be a rank")
    arguments = parser.parse_args()
    if arguments.as_rank:
        rank_program(Path(arguments.as_rank))
        return
    facts: dict[str, Any] = {"machine": machine(), "versions": versions("torch", "echelon", "submitit", "slurmic"), "seconds": {}}
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name, cluster(Path(name)) as environment:
        Path(name).chmod(0o755)
        for nodes in arguments.nodes:
            there = [n for n in LAUNCHERS if installed(MODULES[n]) and (nodes == 1 or n != "nntool")]
            found: dict[str, list[float | None]] = {launcher: [] for launcher in there}
            for _ in range(arguments.rounds):
                for launcher, seconds in found.items():
                    seconds.append(measure(launcher, nodes, arguments.ranks_per_node, environment))
            where = f"{nodes} x {arguments.ranks_per_node} ranks"
            facts["seconds"][where] = found
            good = {k: [s for s in v if s is not None] for k, v in found.items()}
            cells = [f"{median(good[n]):.2f} ({spread(good[n], 2)})" if good.get(n) else "-" for n in LAUNCHERS]
            peers = [median(v) for k, v in good.items() if k != "echelon" and v]
            ratio = f"{median(good['echelon']) / min(peers):.2f}" if peers and good["echelon"] else "-"
            rows.append([where, *cells, ratio, f"<= {TARGET}"])
    header = ["", "echelon, s", "submitit + torchrun, s", "nntool, s", "ratio", "target"]
    emit(arguments, f"Submission to first step: seconds, median of {arguments.rounds}", header, rows, facts=facts)


if __name__ == "__main__":
    main()
