"""Functions as jobs on a real Slurm: by themselves, and through a real `accelerate launch` and `torchrun`.

All are submitted at once, by two programs that run as a user's do; each test looks at one.
"""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon import SlurmConfig, slurm_fn
from echelon.common.errors import RankFailedError, UsageError
from echelon.contracts.run_dir import RunDir
from echelon.launcher.cluster.function_job import FunctionJob
from echelon.launcher.cluster.jobs import job_of
from echelon.launcher.protocol import JobState
from tests.slurm import nntool_main
from tests.slurm.conftest import Cluster

HERE = Path(__file__).parent
NAME = "a\"b'c\\d; touch planted #x $HOME %j é"
SECRET = "canary-5f3a"
LIMIT_S = 600.0


class Fleet:
    """The jobs that a program has submitted, by name."""

    def __init__(self, cluster: Cluster, home: Path, program: str, *args: str) -> None:
        self.cluster, self.home = cluster, home
        name = {"nntool_main.py": "main.py"}.get(program, program)
        shutil.copy(HERE / program, home / name)
        env = {**cluster.env, "PLANTED_TOKEN": SECRET}
        said = subprocess.run(
            [sys.executable, name, *args],
            cwd=home,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert said.returncode == 0, said.stderr
        self.paths: dict[str, str] = json.loads(said.stdout)
        (home / name).write_text("raise SystemExit('edited after it was submitted')\n")

    def job(self, name: str) -> FunctionJob:
        return FunctionJob(job_of(RunDir(self.paths[name])))

    def result(self, name: str) -> Any:
        return self.job(name).result(LIMIT_S)

    def failure(self, name: str) -> RankFailedError:
        with pytest.raises(RankFailedError) as raised:
            self.result(name)
        return raised.value


@pytest.fixture(scope="module")
def fleet(slurm_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    ships = Fleet(slurm_cluster, tmp_path_factory.mktemp("home of functions"), "functions.py", NAME)
    logs = [ships.job("trains-launched").run.path / "attempts" / "000" / f"rank{rank}.log" for rank in range(4)]
    slurm_cluster.until(
        lambda: all(p.exists() and p.read_text().count("step of attempt 0") > 3 for p in logs), "it to train", LIMIT_S
    )
    # As Slurm does before the limit: to the steps.
    slurm_cluster.command("scancel", "--signal=USR1", ships.job("trains-launched").id)
    yield ships


@pytest.fixture(scope="module")
def page(fleet: Fleet, slurm_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The program of nntool's page; its jobs wait behind the others."""
    yield Fleet(slurm_cluster, tmp_path_factory.mktemp("page"), "nntool_main.py")


@pytest.fixture(autouse=True)
def commands_of_slurm(slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))


@pytest.mark.full
def test_the_warning_reaches_all_ranks_and_the_job_goes_on_from_its_checkpoint(fleet: Fleet, page: Fleet) -> None:
    """Without a launch command it is a job like others: see test_slurm.py."""
    job = fleet.job("trains-launched")
    first, values = job.run.path / "attempts" / "000", job.result(LIMIT_S)
    assert fleet.cluster.info(job.id)["Restarts"] == "1"
    assert [json.loads((first / f"exit.rank{rank}.json").read_text())["exit_code"] for rank in range(4)] == [75] * 4
    began, ended, weights = values[0]
    assert values == [values[0]] * 4 and 0 < began < ended == 12
    assert sum(p.read_text().count("step of attempt") for p in job.run.path.glob("attempts/*/rank0.log")) == 12
    assert weights == pytest.approx(plain_weights(12), rel=1e-5)


def plain_weights(steps: int) -> list[float]:
    """What functions.py's `trains` trains, in one process and nothing but PyTorch; only the order of the samples is ours."""
    import echelon as ech

    torch.manual_seed(0)
    module = torch.nn.Linear(3, 1)
    loader = ech.Loader(torch.utils.data.TensorDataset(torch.randn(32, 3)), 8, seed=1)
    optimizer, done = torch.optim.SGD(module.parameters(), lr=0.1), 0
    for epoch in range(steps):
        loader.set_epoch(epoch)
        for (rows,) in loader:
            if done < steps:
                optimizer.zero_grad()
                module(rows).square().mean().backward()
                optimizer.step()
                done += 1
    return [float(p.detach().sum()) for p in module.parameters()]


@pytest.mark.full
def test_every_rank_of_two_nodes_gives_its_value(fleet: Fleet) -> None:
    values = fleet.result("plain")
    hosts = [host for _, _, _, host in values]
    assert [(x, rank, total) for x, rank, total, _ in values] == [(5, rank, 4) for rank in range(4)]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert "secret of length 11, set-up" in fleet.job("plain").log(3).read_text()  # a variable of the ranks; a line of shell


@pytest.mark.parametrize("name", ["fails", "fails-launched"])
@pytest.mark.full
def test_the_first_failing_ranks_own_exception_arrives(fleet: Fleet, name: str) -> None:
    error = fleet.failure(name)
    assert error.rank == 3 and "rank 3 failed first" in str(error) and "in fails" in str(error)
    assert isinstance(error.__cause__, ValueError) and error.__cause__.args == ("planted on rank 3", 3)
    assert fleet.job(name).state() is JobState.FAILED


@pytest.mark.full
def test_a_rank_killed_by_a_signal_under_a_launch_command_is_named(fleet: Fleet) -> None:
    """Without one it is a rank of a job like others: see test_slurm.py."""
    error = fleet.failure("killed-launched")
    assert error.rank == 2 and "ended without a word: killed" in str(error) and error.__cause__ is None


@pytest.mark.full
def test_a_cancelled_job_resolves_and_so_does_one_that_waited_for_it(fleet: Fleet) -> None:
    job = fleet.job("waits")
    fleet.cluster.until(lambda: job.log().exists() and "waiting" in job.log().read_text(), "it to run", LIMIT_S)
    job.cancel()
    assert "cancelled" in str(fleet.failure("waits")) and job.state() is JobState.CANCELLED and job.done()
    assert "DependencyNeverSatisfied" in str(fleet.failure("never"))


@pytest.mark.full
def test_a_name_is_just_a_name_and_conditions_come_true(fleet: Fleet) -> None:
    assert fleet.result("named")[:3] == (3, 0, 1) and fleet.result("after")[:3] == (7, 0, 1)
    names = fleet.cluster.command("scontrol", "-o", "show", "job", fleet.job("named").id)
    assert f"JobName={NAME} " in names and "Comment=a b; $HOME " in names
    assert not list(fleet.home.rglob("planted"))


@pytest.mark.full
def test_an_array_has_a_job_for_each_element(fleet: Fleet) -> None:
    assert [fleet.result(f"array-{n}")[0] for n in range(2)] == [11, 22]
    assert [fleet.job(f"array-{n}").id.partition("_")[2] for n in range(2)] == ["0", "1"]
    array = fleet.job("array-1").run.path.parents[1].name
    table = fleet.cluster.echelon("jobs", array, "--runs", "slurm", cwd=fleet.home).stdout  # they are runs like others
    assert [line.split()[:3:2] for line in table.splitlines()[1:]] == [[f"{array}/{n}", "done"] for n in range(2)]


@pytest.mark.full
def test_another_file_than_the_one_submitted_is_not_loaded(fleet: Fleet) -> None:
    job, evidence = fleet.job("held"), fleet.home / "it-ran"
    assert job.state() is JobState.PENDING
    (job.run.path / "job" / "call.pkl").write_bytes(f"cos\nsystem\n(S'touch \"{evidence}\"'\ntR.".encode())
    fleet.cluster.command("scontrol", "release", job.id)
    assert "is not the call that was submitted" in str(fleet.failure("held"))
    assert not evidence.exists()


@pytest.mark.full
def test_only_the_user_can_read_and_a_secret_is_in_one_file(fleet: Fleet) -> None:
    fleet.result("plain")
    for path in fleet.home.glob("slurm/**/*"):
        assert not stat.S_IMODE(path.lstat().st_mode) & 0o077 or path.is_symlink(), path
    holders = {p.name for p in fleet.home.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()}
    assert holders == {"job.json"}  # of this job alone, since the scripts of the others name no value
    assert SECRET not in fleet.cluster.command("scontrol", "show", "job")


def plain_page() -> dict[str, torch.Tensor]:
    """What the page's program trains, in one process and nothing but PyTorch."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(2024)
        model, optimizer, loader = nntool_main.build({"batch": 16, "lr": 0.1}, 1)
        for _ in range(3):
            for rows, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(rows), targets).backward()
                optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("single", "Sequential"),
        ("ddp", "DistributedDataParallel"),
        ("fsdp2", "FSDPSequential"),
    ],
)
@pytest.mark.full
def test_the_page_of_nntool_trains_what_one_process_trains(page: Fleet, name: str, wrapped: str) -> None:
    results, want = page.job(name).results(LIMIT_S), plain_page()
    _, nodes, processes = nntool_main.CASES[name]
    assert [r["as"] for r in results] == [wrapped] * (nodes * processes)
    for got in [r["final"] for r in results if r["final"]]:  # FSDP's is on the first rank
        assert {k.removeprefix("module.") for k in got} == want.keys()
        assert max(float((torch.tensor(v, dtype=torch.float64) - want[k]).abs().max()) for k, v in got.items()) < 1e-12
    assert results[0]["final"] and f"rank 0 of {nodes * processes} has trained" in page.job(name).log(0).read_text()


@slurm_fn
def nothing() -> None: ...


def test_what_slurm_refuses_is_one_line_and_leaves_nothing(slurm_cluster: Cluster, tmp_path: Path) -> None:
    changes = {"extra_params_kwargs": {"no-such-option": "x"}}
    config = SlurmConfig(mode="slurm", pack_code=False, **changes).set_output_path(tmp_path / "runs")
    with pytest.raises(UsageError, match="Slurm refuses the job: unrecognized option '--no-such-option") as refused:
        nothing[config]()
    assert "\n" not in str(refused.value) and not list((tmp_path / "runs").iterdir())
