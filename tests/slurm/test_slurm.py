"""Jobs on a real Slurm: what they compute, how they fail, and that whatever interrupts them leaves no trace in the result.

All jobs run side by side: `fleet` submits them, and does to some of them what is to be done; each test looks at one. A job
that is to be interrupted waits at a step until it is, on nodes of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.common.errors import RankFailedError
from echelon.contracts.run_dir import RunDir, read_json
from echelon.launcher.cluster.jobs import job_of, tasks_of
from echelon.launcher.protocol import FolderJob, JobState
from tests.slurm.conftest import Cluster

EPOCHS, UPDATES = 3, 12
FOUR = ("--nodes", 2, "--ranks-per-node", 2)
# With --bitwise the number of ranks does not matter: "bits" has four, and those that are compared with it two. "limit" is plain
# DDP, and has the bits of "ddp": the order of its sums is restored, too.
BITS = ("--bitwise", "--nodes", 2)
ELSEWHERE = ("--exclude", "node[1-5]")
HELD = ("--hold-at", 5)
FLEET: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "limit": ((*ELSEWHERE, *FOUR, "--time", "10m", "--warn", "60s"), HELD),
    "low": ((*BITS, "--nodelist", "node[1-2]"), HELD),
    "lost": ((*BITS, "--exclude", "node[1-2],node[6-8]"), (*HELD, "--save-every", 2)),
    "stop": ((*ELSEWHERE, "--nodes", 2), HELD),
    "ddp": ((*ELSEWHERE, *FOUR, "-m"), ()),
    "bits": ((*ELSEWHERE, "--bitwise", *FOUR), ()),
    "raises": ((*ELSEWHERE, *FOUR, "--no-requeue"), ("--raise-on", 3)),
    "killed": ((*ELSEWHERE, "--nodes", 2), ("--kill-on", 1)),
    "sweep": ((*ELSEWHERE, "--sweep", "lr=0.1,0.01", "--sweep", "steps=2"), ()),
}


class Fleet:
    def __init__(self, cluster: Cluster, home: Path) -> None:
        self.cluster, self.home = cluster, home
        self.followed: subprocess.Popen[bytes] | None = None
        self.urgent: subprocess.Popen[bytes] | None = None
        self.lost_node = self.cancelled = ""

    def submit(self, name: str, options: tuple[Any, ...] = (), args: tuple[Any, ...] = ()) -> None:
        length = () if "--sweep" in options else ("--epochs", EPOCHS)
        script = "train" if "-m" in options else "train.py"
        said = self.cluster.echelon("submit", "--name", name, *options, script, *length, *args, cwd=self.home)
        assert said.returncode == 0, said.stderr

    def job(self, name: str) -> FolderJob:
        return job_of(RunDir(self.home / "runs" / name))

    def final(self, name: str) -> dict[str, Any]:
        job = self.job(name)
        job.result(timeout_s=600)
        made: dict[str, Any] = json.loads((job.run.path / "final.json").read_text())
        return made["final"]

    def output(self, name: str) -> str:
        return (self.home / "runs" / name / "job" / "output.log").read_text()

    def log(self, name: str) -> str:
        """Of rank 0, in all attempts."""
        return "".join(p.read_text() for p in sorted((self.home / "runs" / name / "attempts").glob("*/rank0.log")))

    def until_it_trains(self, name: str) -> str:
        self.cluster.until(lambda: f"step {HELD[1] - 1} of attempt 0" in self.log(name), f"{name} to train", 120)
        return self.job(name).id

    def interrupt(self) -> None:
        """Each of those that wait, in its own way; nobody waits here for what comes of it."""
        cluster = self.cluster
        self.followed = self._start("followed", sys.executable, "-m", "echelon", "logs", "limit", "--follow")
        # Slurm looks at the limits every half minute, and warns of all that end before it looks the next time.
        limited = self.until_it_trains("limit")
        cluster.expire(limited, 89)
        self.until_it_trains("low")
        self.submit("waits", ("--nodelist", "node1", "--exclusive"))  # which it will not get
        cluster.command("scancel", self.job("waits").id)
        cluster.command("scontrol", "update", "partitionname=batch", "GraceTime=60")  # patience: it ends once it has saved
        self.urgent = self._start("urgent", "srun", "-p", "urgent", "-w", "node[1-2]", "--exclusive", "true")
        self.lost_node = cluster.nodes_of(self.until_it_trains("lost"))[1]
        cluster.fail_node(self.lost_node)
        self.until_it_trains("stop")
        self.cancelled = cluster.echelon("cancel", "stop", cwd=self.home).stdout
        cluster.until(lambda: cluster.info(limited)["Restarts"] != "0", "limit to be started again", 240)
        # Slurm made its limit what was left of it: one or two minutes, less than a start takes on a loaded machine.
        cluster.command("scontrol", "update", f"jobid={limited}", "TimeLimit=10")

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with open(self.home / f"{name}.out", "wb") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.home, env=self.cluster.env
            )


@pytest.fixture(scope="module")
def fleet(slurm_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("home of %j jobs")
    shutil.copy(Path(__file__).with_name("train.py"), home)
    ships = Fleet(slurm_cluster, home)
    try:
        for name, (options, args) in FLEET.items():
            ships.submit(name, options, args)
        (home / "train.py").write_text("raise SystemExit('edited after it was submitted')\n")
        ships.interrupt()
        yield ships
    finally:
        slurm_cluster.command("scontrol", "update", "partitionname=batch", "GraceTime=0")
        slurm_cluster.lab("reset")
        for started in (ships.followed, ships.urgent):
            if started is not None:
                started.kill()
                started.wait()


@pytest.fixture(autouse=True)
def commands_of_slurm(slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))


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
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            for rows, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(module(rows), targets).backward()
                optimizer.step()
                done += 1
        assert done == UPDATES
        return {name: p.detach().clone() for name, p in module.named_parameters()}
    finally:
        torch.set_default_dtype(before)


@pytest.mark.full
def test_two_nodes_of_two_ranks_train_what_one_process_trains(fleet: Fleet) -> None:
    got, want = fleet.final("ddp"), plain()
    assert got.keys() == want.keys()
    assert max(float((torch.tensor(got[k], dtype=torch.float64) - want[k]).abs().max()) for k in want) < 1e-12
    logs = [fleet.job("ddp").log(rank).read_text() for rank in range(4)]
    hosts = [log.rpartition(" is done")[0].rpartition(" ")[2] for log in logs]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]  # (node, local rank), and an edit after submission changed nothing


@pytest.mark.full
def test_an_exception_arrives_with_its_own_traceback(fleet: Fleet) -> None:
    with pytest.raises(RankFailedError, match="planted on rank 3") as raised:
        fleet.job("raises").result(timeout_s=600)
    assert raised.value.rank == 3 and "in compute_loss" in str(raised.value)
    assert "rank 3 failed first" in fleet.output("raises") and "ValueError: planted on rank 3" in fleet.output("raises")
    assert fleet.job("raises").state() is JobState.FAILED
    assert set(read_json(fleet.job("raises").attempts[-1] / "exit.json")["ranks"]) >= {"3"}  # type: ignore[index]


@pytest.mark.full
def test_a_rank_killed_by_a_signal_is_named(fleet: Fleet) -> None:
    with pytest.raises(RankFailedError, match="killed by SIGKILL") as raised:
        fleet.job("killed").result(timeout_s=600)
    assert (raised.value.rank, raised.value.exit_code) == (1, 137)
    assert len(fleet.job("killed").attempts) == 1  # a failure is no reason to start again


@pytest.mark.full
def test_a_sweep_is_an_array_with_a_table_of_results(fleet: Fleet) -> None:
    tasks = tasks_of(fleet.home / "runs" / "sweep")
    for task in tasks:
        job_of(RunDir(task)).result(timeout_s=600)
    table = fleet.cluster.echelon("jobs", "sweep", cwd=fleet.home).stdout.splitlines()
    rows = [line.split() for line in table]
    assert rows[0] == ["run", "job", "state", "ranks", "starts", "lr", "steps", "step", "loss"]
    assert [(row[2], *row[5:8]) for row in rows[1:]] == [("done", lr, "2", "2") for lr in ("0.1", "0.01")]
    assert json.loads((tasks[1] / "final.json").read_text())["lr"] == 0.01


@pytest.mark.full
def test_the_time_limit_warns_and_the_job_goes_on_bit_equal(fleet: Fleet) -> None:
    assert fleet.final("limit") == fleet.final("ddp")
    assert "SIGUSR1: asked the ranks to save and end" in fleet.output("limit")
    assert fleet.cluster.info(fleet.job("limit").id)["Restarts"] == "1" and len(fleet.job("limit").attempts) == 2


@pytest.mark.full
def test_logs_follow_a_job_through_its_starts_to_its_end(fleet: Fleet) -> None:
    fleet.final("limit")
    assert fleet.followed is not None and fleet.followed.wait(150) == 0
    said = (fleet.home / "followed.out").read_text()
    last = len(fleet.job("limit").attempts) - 1
    assert "step 0 of attempt 0" in said and f"step {UPDATES - 1} of attempt {last}" in said and "is done" in said
    refused = fleet.cluster.echelon("logs", "limit", "--rank", 7, cwd=fleet.home)
    assert refused.returncode == 2 and "rank must be between 0 and 3, got 7" in refused.stderr


@pytest.mark.full
def test_a_preempted_job_saves_and_goes_on_bit_equal(fleet: Fleet) -> None:
    assert fleet.urgent is not None and fleet.urgent.wait(150) == 0
    assert fleet.final("low") == fleet.final("bits")
    assert fleet.cluster.info(fleet.job("low").id)["Restarts"] == "1"
    assert f"step {HELD[1]} of attempt 1" not in fleet.log("low")  # it had saved, and began where it was


@pytest.mark.full
def test_a_node_that_dies_is_left_out_and_the_job_goes_on_bit_equal(fleet: Fleet) -> None:
    assert fleet.final("lost") == fleet.final("bits")
    assert fleet.lost_node not in fleet.cluster.nodes_of(fleet.job("lost").id)
    assert "step 1 of attempt 1" not in fleet.log("lost")


@pytest.mark.full
def test_a_cancelled_job_saves_ends_and_resolves(fleet: Fleet) -> None:
    assert fleet.cancelled == f"job {fleet.job('stop').id} is cancelled\n"
    outcome = fleet.job("stop").wait(150)
    assert fleet.job("stop").state() is JobState.CANCELLED and outcome.exit_code != 0
    with pytest.raises(RankFailedError, match="cancelled"):
        fleet.job("stop").result(1)
    fleet.cluster.until(lambda: "cancelled: not started again" in fleet.output("stop"), "the last word")
    assert "step" in str(list((fleet.home / "runs/stop/checkpoints").glob("step-*")))  # it saved


@pytest.mark.full
def test_a_job_that_is_cancelled_before_it_begins_resolves(fleet: Fleet) -> None:
    assert fleet.job("waits").wait(120).exit_code == 143 and fleet.job("waits").state() is JobState.CANCELLED
    assert not fleet.job("waits").attempts


@pytest.mark.full(but=("options0",))
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
    said = slurm_cluster.echelon("submit", "--dry-run", "--nodes", 2, "--name", "dry", "train.py", cwd=tmp_path)
    assert said.returncode == 0 and said.stdout.startswith("#!/bin/bash\n") and "to start at" in said.stderr
    assert not (tmp_path / "runs").exists() and not slurm_cluster.command("squeue", "--noheader", "--name=dry").strip()
