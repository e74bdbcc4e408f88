"""Jobs on a real Slurm: what they compute, how they fail, and that whatever interrupts them leaves no trace in the result.

The jobs that nothing else disturbs run side by side: `fleet` submits them all, each test looks at one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.contracts.errors import RankFailedError
from echelon.contracts.run_dir import RunDir, read_json
from echelon.launcher.jobs import job_of, tasks_of
from echelon.launcher.protocol import FolderJob, JobState
from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.xdist_group("slurm")

STEPS = 30
PAIR = ("--nodes", 2, "--ranks-per-node", 2)
# Sums of four ranks depend on how DDP has split them, which differs after a resume (by 1e-16 in float64).
BITS = ("--bitwise", *PAIR)
FLEET: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "limit": ((*BITS, "--time", "10m", "--warn", "10s"), ("--slowly", 2.5)),
    "ddp": (PAIR, ()),
    "bits": (BITS, ()),
    "fsdp": (PAIR, ("--strategy", "fsdp")),
    "raises": ((*PAIR, "--no-requeue"), ("--raise-on", 3)),
    "killed": (PAIR, ("--kill-on", 2)),
    "sweep": (("--sweep", "lr=0.1,0.01", "--sweep", "steps=2,3"), ()),
}


class Fleet:
    def __init__(self, cluster: Cluster, home: Path) -> None:
        self.cluster, self.home = cluster, home

    def submit(self, name: str, options: tuple[Any, ...] = (), args: tuple[Any, ...] = ()) -> None:
        steps = () if "--sweep" in options else ("--steps", STEPS)
        said = self.cluster.echelon("submit", "--name", name, *options, "train.py", *steps, *args, cwd=self.home)
        assert said.returncode == 0, said.stderr

    def job(self, name: str) -> FolderJob:
        return job_of(RunDir(self.home / "runs" / name))

    def final(self, name: str) -> dict[str, Any]:
        job = self.job(name)
        job.result(timeout_s=150)
        made: dict[str, Any] = json.loads((job.run.path / "final.json").read_text())
        return made["final"]

    def output(self, name: str) -> str:
        return (self.home / "runs" / name / "job" / "output.log").read_text()

    def log(self, name: str) -> str:
        """Of rank 0, in all attempts."""
        return "".join(p.read_text() for p in sorted((self.home / "runs" / name / "attempts").glob("*/rank0.log")))

    def until_it_trains(self, name: str, step: int = 4) -> str:
        self.cluster.until(lambda: f"step {step} of attempt 0" in self.log(name), f"{name} to train")
        return self.job(name).id


@pytest.fixture(scope="module")
def fleet(slurm_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("home of %j jobs")
    shutil.copy(Path(__file__).with_name("train.py"), home)
    ships = Fleet(slurm_cluster, home)
    for name, (options, args) in FLEET.items():
        ships.submit(name, options, args)
    (home / "train.py").write_text("raise SystemExit('edited after it was submitted')\n")
    slurm_cluster.expire(ships.until_it_trains("limit", 1), 35)  # the controller looks every half minute
    yield ships


@pytest.fixture(autouse=True)
def commands_of_slurm(slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))


@pytest.fixture
def queued_again(fleet: Fleet) -> Iterator[Fleet]:
    """After the fleet is in, and with the original script."""
    for name in FLEET:
        for path in tasks_of(fleet.home / "runs" / name) or [fleet.home / "runs" / name]:
            job_of(RunDir(path)).wait(150)
    shutil.copy(Path(__file__).with_name("train.py"), fleet.home)
    yield fleet
    fleet.cluster.lab("reset")


def plain() -> dict[str, torch.Tensor]:
    """What train.py trains, in one process and in nothing but PyTorch; only the order of the samples is ours."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        x = torch.randn(64, 6)
        y = x.sum(1, keepdim=True).tanh()
        module = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        loader, done = ech.Loader(torch.utils.data.TensorDataset(x, y), 16, seed=3), 0
        for epoch in range(STEPS):
            loader.set_epoch(epoch)
            for rows, targets in loader:
                if done < STEPS:
                    optimizer.zero_grad()
                    torch.nn.functional.mse_loss(module(rows), targets).backward()
                    optimizer.step()
                    done += 1
        return {name: p.detach().clone() for name, p in module.named_parameters()}
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_nodes_of_two_ranks_train_what_one_process_trains(fleet: Fleet, strategy: str) -> None:
    got, want = fleet.final(strategy), plain()
    assert got.keys() == want.keys()
    assert max(float((torch.tensor(got[k], dtype=torch.float64) - want[k]).abs().max()) for k in want) < 1e-12
    logs = [fleet.job(strategy).log(rank).read_text() for rank in range(4)]
    hosts = [log.rpartition(" is done")[0].rpartition(" ")[2] for log in logs]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]  # (node, local rank), and an edit after submission changed nothing


def test_an_exception_arrives_with_its_own_traceback(fleet: Fleet) -> None:
    with pytest.raises(RankFailedError, match="planted on rank 3") as raised:
        fleet.job("raises").result(timeout_s=100)
    assert raised.value.rank == 3 and "in compute_loss" in str(raised.value)
    assert "rank 3 failed first" in fleet.output("raises") and "ValueError: planted on rank 3" in fleet.output("raises")
    assert fleet.job("raises").state() is JobState.FAILED
    assert set(read_json(fleet.job("raises").attempts[-1] / "exit.json")["ranks"]) >= {"3"}  # type: ignore[index]


def test_a_rank_killed_by_a_signal_is_named(fleet: Fleet) -> None:
    with pytest.raises(RankFailedError, match="killed by SIGKILL") as raised:
        fleet.job("killed").result(timeout_s=100)
    assert (raised.value.rank, raised.value.exit_code) == (2, 137)
    assert len(fleet.job("killed").attempts) == 1  # a failure is no reason to start again


def test_a_sweep_is_an_array_with_a_table_of_results(fleet: Fleet) -> None:
    tasks = tasks_of(fleet.home / "runs" / "sweep")
    for task in tasks:
        job_of(RunDir(task)).result(timeout_s=100)
    table = fleet.cluster.echelon("jobs", "sweep", cwd=fleet.home).stdout.splitlines()
    rows = [line.split() for line in table]
    assert rows[0] == ["run", "job", "state", "ranks", "starts", "lr", "steps", "step", "loss"]
    assert [(row[2], row[5], row[6], row[7]) for row in rows[1:]] == [
        ("done", lr, steps, steps) for lr in ("0.1", "0.01") for steps in ("2", "3")
    ]
    assert json.loads((tasks[2] / "final.json").read_text())["lr"] == 0.01


def test_the_time_limit_warns_and_the_job_goes_on_bit_equal(fleet: Fleet) -> None:
    job = fleet.job("limit").id
    assert fleet.final("limit") == fleet.final("bits")
    assert "SIGUSR1: asked the ranks to save and end" in fleet.output("limit")
    assert fleet.cluster.info(job)["Restarts"] == "1" and len(fleet.job("limit").attempts) == 2


def test_a_preempted_job_saves_and_goes_on_bit_equal(queued_again: Fleet) -> None:
    cluster = queued_again.cluster
    queued_again.submit("low", (*BITS, "--exclusive"), ("--slowly", 0.3))
    job = queued_again.until_it_trains("low")
    cluster.command("scontrol", "update", "partitionname=batch", "GraceTime=20")
    try:
        cluster.command("srun", "-p", "urgent", "-N4", "--exclusive", "true")
    finally:
        cluster.command("scontrol", "update", "partitionname=batch", "GraceTime=0")
    assert queued_again.final("low") == queued_again.final("bits")
    assert cluster.info(job)["Restarts"] == "1"
    assert "step 4 of attempt 1" not in queued_again.log("low")  # it had saved, and began where it was


def test_a_node_that_dies_is_left_out_and_the_job_goes_on_bit_equal(queued_again: Fleet) -> None:
    cluster = queued_again.cluster
    queued_again.submit("lost", BITS, ("--slowly", 0.3, "--save-every", 2))
    job = queued_again.until_it_trains("lost")
    bad = cluster.nodes_of(job)[1]
    cluster.fail_node(bad)
    assert queued_again.final("lost") == queued_again.final("bits")
    assert bad not in cluster.nodes_of(job)
    assert "step 1 of attempt 1" not in queued_again.log("lost")


def test_a_cancelled_job_saves_ends_and_resolves(queued_again: Fleet) -> None:
    queued_again.submit("stop", PAIR, ("--slowly", 0.3))
    job = queued_again.until_it_trains("stop")
    said = queued_again.cluster.echelon("cancel", "stop", cwd=queued_again.home)
    assert said.stdout == f"job {job} is cancelled\n"
    outcome = queued_again.job("stop").wait(30)
    assert queued_again.job("stop").state() is JobState.CANCELLED and outcome.exit_code != 0
    with pytest.raises(RankFailedError, match="cancelled"):
        queued_again.job("stop").result(1)
    queued_again.cluster.until(lambda: "cancelled: not started again" in queued_again.output("stop"), "the last word", 15)
    assert "step" in str(list((queued_again.home / "runs/stop/checkpoints").glob("step-*")))  # it saved
    # and by Slurm's own command, while it waits: it never began, and still is no riddle
    queued_again.cluster.command("scontrol", "update", "partitionname=batch", "state=down")
    try:
        queued_again.submit("waits")
        queued_again.cluster.command("scancel", queued_again.job("waits").id)
        assert queued_again.job("waits").wait(10).exit_code == 143
    finally:
        queued_again.cluster.command("scontrol", "update", "partitionname=batch", "state=up")


def test_logs_follow_a_job_to_its_end(queued_again: Fleet) -> None:
    queued_again.submit("follow")
    said = queued_again.cluster.echelon("logs", "follow", "--follow", cwd=queued_again.home)
    assert said.returncode == 0 and f"step {STEPS - 1} of attempt 0" in said.stdout and "is done" in said.stdout
    said = queued_again.cluster.echelon("logs", "follow", "--rank", 7, cwd=queued_again.home)
    assert said.returncode == 2 and "has ranks 0 to 0" in said.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--partition", "nowhere"), "Slurm refuses the job: Batch job submission failed: Invalid partition name specified"),
        (("--nodes", 9), "Slurm would never start the job: Partition"),
        (("--cpus-per-rank", 99), "Slurm would never start the job: "),
        (("--mem", "lots"), "Slurm refuses the job: Invalid --mem specification"),
    ],
)
def test_what_slurm_refuses_is_one_line_and_leaves_nothing(
    slurm_cluster: Cluster, tmp_path: Path, options: tuple[Any, ...], reason: str
) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    said = slurm_cluster.echelon("submit", *options, "train.py", cwd=tmp_path)
    assert said.returncode == 2 and said.stderr.startswith(f"echelon: {reason}") and said.stderr.count("\n") == 1, said.stderr
    assert not list((tmp_path / "runs").iterdir())
    assert not slurm_cluster.command("squeue", "--noheader", "--states=PENDING", f"--name={os.listdir(tmp_path)[0]}").strip()


def test_a_dry_run_asks_slurm_and_submits_nothing(slurm_cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    began = time.time()
    said = slurm_cluster.echelon("submit", "--dry-run", "--nodes", 2, "--name", "dry", "train.py", cwd=tmp_path)
    assert said.returncode == 0 and said.stdout.startswith("#!/bin/bash\n") and "to start at" in said.stderr
    assert not (tmp_path / "runs").exists() and not slurm_cluster.command("squeue", "--noheader", "--name=dry").strip()
    assert time.time() - began < 10
