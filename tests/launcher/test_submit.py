"""`echelon submit` without a cluster: the batch script as text, the copy of the code, jobs in the background of this machine."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.submit import parse_sweep
from echelon.common.errors import ClusterError, EchelonError, RankFailedError, RunFolderError, UsageError
from echelon.contracts.run_dir import RunDir, read_json, write_json
from echelon.diagnosis.failure import Failure
from echelon.launcher.cluster.background import LocalLauncher
from echelon.launcher.cluster.finish_job import finish_job, refuse
from echelon.launcher.cluster.jobs import job_of
from echelon.launcher.cluster.slurm import commands
from echelon.launcher.cluster.slurm.render import SlurmOptions, exported, render
from echelon.launcher.cluster.snapshot import snapshot
from echelon.launcher.job import JobSpec
from echelon.launcher.local import nodes
from echelon.launcher.protocol import JobState, write_spec
from tests.conftest import clean_environment
from tests.kit.refusals import refused
from tests.kit.started import wait_until

pytestmark = pytest.mark.usefixtures("forked_programs")

GOLDEN = """#!/bin/bash
# Written by `echelon submit`; sbatch has its own copy, so that changing this one changes nothing.
#SBATCH --job-name=gpt-7
#SBATCH --chdir=/home/me
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --mem=64G
#SBATCH --time=1-12:30:00
#SBATCH --partition=gpu
#SBATCH --output="/data/my runs/gpt-7/job/output.log"
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --export=PATH,WANDB_API_KEY
#SBATCH --requeue

run='/data/my runs/gpt-7'
python=/opt/env/bin/python
umask 077
trap : TERM  # the nodes are asked to save and end, and this shell waits for them

# One launcher on every node starts the node's ranks.
srun --kill-on-bad-exit=1 --export=ALL --cpus-per-task=32 "$python" -P -m echelon.launcher.cluster.node "$run"

# Names the rank that failed first.
"$python" -P -m echelon.launcher.cluster.node "$run" --conclude $?
code=$?

# 75: the ranks have saved and want to go on. A job that was cancelled is no longer running.
if [ $code = 75 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def text(options: SlurmOptions, run: str = "/data/gpt-7", cwd: str = "/home/me", **more: Any) -> str:
    spec = JobSpec("train.py", args=("--key", "secret-argument"), ranks=4, nodes=2, env={"A": "value-of-a"})
    return render(spec, options, Path(run), python="/opt/env/bin/python", cwd=Path(cwd), **more)


def test_the_script_is_the_one_that_people_read() -> None:
    options = SlurmOptions(
        partition="gpu", time_s=131_400, cpus_per_rank=8, gpus_per_node=4, mem="64G", export=("PATH", "WANDB_API_KEY")
    )
    assert text(options, "/data/my runs/gpt-7") == GOLDEN


NASTY = ["a'b", 'a"b', "a b; rm -rf ~", "$(touch x)", "`touch x`", "a\\b", "%j %a", "é", "#SBATCH"]


@pytest.mark.parametrize("tasks", [None, 3])
@pytest.mark.parametrize("folder", NASTY)
def test_a_path_is_one_word_or_is_refused(tmp_path: Path, folder: str, tasks: int | None) -> None:
    run = f"/data/{folder}/gpt-7"
    try:
        script = text(SlurmOptions(), run, tasks=tasks)
    except UsageError:
        assert "\n" not in str(refused)
        assert set(folder) & set("'\"\\")
        return
    (tmp_path / "script").write_text(script)
    subprocess.run(["bash", "-n", "script"], cwd=tmp_path, check=True)
    line = next(line for line in script.splitlines() if line.startswith("run="))
    echo = f'SLURM_ARRAY_TASK_ID=2; {line}; printf %s "$run"'
    said = subprocess.run(["bash", "-c", echo], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said == run + ("/tasks/2" if tasks else "") and os.listdir(tmp_path) == ["script"]


@pytest.mark.parametrize("value", ["a b", "a;b", "a\nb", "$(x)", "'", '"', "`x`", "-a", "", "#x", "a\\b", "é"])
@pytest.mark.parametrize("name", ["partition", "account", "qos", "constraint", "nodelist", "exclude", "reservation", "mem"])
def test_a_value_that_is_more_than_a_value_is_refused(name: str, value: str) -> None:
    with refused(ClusterError, name=f"--{name}", got=repr(value)) as caught:
        text(SlurmOptions(**{name: value}))
    assert "\n" not in str(caught.value)


def test_a_name_that_is_no_name_is_refused_in_one_line(echelon_command: Any, tmp_path: Path) -> None:
    """Which those are: tests/contracts/test_run_dir.py."""
    (tmp_path / "train.py").write_text("pass\n")
    said = echelon_command("submit", "--name", "a\nb", "--dry-run", "train.py")
    assert said.returncode == 2 and said.stderr.count("\n") == 1 and not said.stdout


def test_no_value_of_the_environment_is_in_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "canary",
        "CUDA_API_KEY": "canary",
        "TORCH_PASSWORD": "canary",
        "X": "1",
    }
    fabric = ["FI_PROVIDER", "UCX_TLS", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"]
    assert exported([*fabric, "FINE", "UCX"]) == tuple(sorted(fabric))
    names = exported(list(environment), ["HF_TOKEN"])
    assert names == ("HF_TOKEN", "NCCL_DEBUG", "PATH")  # a secret by its name, if it was named
    script = text(SlurmOptions(export=names))
    assert not [value for value in ("canary", "/bin:", "INFO", "value-of-a", "secret-argument") if value in script]
    assert "--export=NIL" in text(SlurmOptions())  # else all that is set would go with the job


def test_a_rank_with_a_gpu_has_four_cores_unless_somebody_says_otherwise() -> None:
    for options, cores in (
        (SlurmOptions(), 1),
        (SlurmOptions(gpus_per_node=4), 4),
        (SlurmOptions(gpus_per_node=4, cpus_per_rank=2), 2),
    ):
        assert f"--cpus-per-task={4 * cores}\n" in text(options)


def test_a_sweep_is_all_pairs_and_says_what_it_cannot_read() -> None:
    assert parse_sweep(["lr=1e-3,3e-4,1e-3", "--seed=1"]) == [(("lr", "1e-3"), ("seed", "1")), (("lr", "3e-4"), ("seed", "1"))]
    for bad in (["lr"], ["lr="], ["=1"], ["lr=1,,2"], ["l r=1"], ["lr=1", "lr=2"]):
        with pytest.raises(UsageError):
            parse_sweep(bad)


def test_without_slurm_submit_says_so_and_a_dry_run_still_prints(echelon_command: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    empty = {"PATH": str(tmp_path)}
    said = echelon_command("submit", "train.py", env=empty)
    assert said.returncode == 2 and "sbatch was not found" in said.stderr and not list((tmp_path / "runs").iterdir())
    said = echelon_command("submit", "--dry-run", "--nodes", "3", "train.py", env=empty)
    assert said.returncode == 0 and "#SBATCH --nodes=3\n" in said.stdout and "no sbatch here" in said.stderr


@pytest.mark.parametrize("git", [True, False])
def test_the_copy_has_the_code_as_it_was(tmp_path: Path, git: bool) -> None:
    code = tmp_path / "code"
    (code / "package").mkdir(parents=True)
    (code / "package" / "train.py").write_text("import helper\n")
    (code / "package" / "helper.py").write_text("1\n")
    (code / ".hidden").write_text("x")
    with open(code / "package" / "large.bin", "wb") as file:
        file.truncate(5 << 20)
    if git:
        (code / ".gitignore").write_text("ignored.txt\n")
        (code / "ignored.txt").write_text("x")
        (code / "top.py").write_text("2\n")
        subprocess.run(["git", "init", "-q"], cwd=code, check=True)
        subprocess.run(["git", "add", "package/train.py"], cwd=code, check=True)
    copy = tmp_path / "runs" / "a" / "job" / "code"
    script = snapshot(code / "package" / "train.py", copy)
    (code / "package" / "helper.py").write_text("edited\n")
    assert script == copy / ("package/train.py" if git else "train.py")
    assert (script.parent / "helper.py").read_text() == "1\n"
    assert (script.parent / "large.bin").is_symlink()  # data, not code
    assert not (copy / "ignored.txt").exists() and (copy / "top.py").exists() is git
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700


@pytest.mark.full
def test_a_module_runs_from_the_copy(echelon_command: Any, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("value = 'as it was'\n")
    (package / "train.py").write_text(
        "import os, sys\nfrom package import helper\n"
        "print(helper.value, os.getcwd(), os.path.dirname(helper.__file__), sys.argv[1:])\n"
    )
    said = echelon_command("submit", "--to", "local", "--name", "a", "-m", "package.train", "--lr", "1")
    assert said.returncode == 0, said.stderr
    (package / "helper.py").write_text("raise RuntimeError('edited')\n")
    job = job_of(RunDir(tmp_path / "runs" / "a"))
    job.result(120)
    assert job.log().read_text() == f"as it was {tmp_path} {tmp_path}/runs/a/job/code/package ['--lr', '1']\n"
    for wrong in (["-m", "package/train.py"], ["-m", "nowhere.train"], ["--max-restarts", "-1", "-m", "package.train"]):
        assert echelon_command("submit", "--to", "local", *wrong).returncode == 2
    for option in (["--time", "2h"], ["--partition", "a"], ["--no-requeue"], ["--sweep", "lr=1"], ["--dry-run"]):
        done = echelon_command("submit", "--to", "local", *option, "-m", "package.train")
        assert done.returncode == 2 and f"{option[0]} is for Slurm" in done.stderr


@pytest.mark.full
def test_a_job_in_the_background_fulfils_the_protocol(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nprint('rank', os.environ['RANK'], flush=True)\n"
        "if sys.argv[1:] == ['waits']: time.sleep(600)\nif sys.argv[1:]: raise ValueError('planted')\n"
    )

    def submit(name: str, *args: str) -> RunDir:
        run = RunDir.create(tmp_path / "runs", name, begin=False)
        LocalLauncher(cwd=tmp_path).submit(JobSpec(str(tmp_path / "train.py"), args=args, ranks=2), run)
        return run

    good, bad, waits = submit("good"), submit("bad", "raise"), submit("waits", "waits")
    job = job_of(good)  # as another process finds it
    assert (job.ranks, job.result(120).exit_code, job.state()) == (2, 0, JobState.DONE)
    assert job.log(1).read_text() == "rank 1\n"
    with refused(RunFolderError):
        job.log(2)
    with pytest.raises(RankFailedError, match="ValueError: planted"):
        job_of(bad).result(120)
    job = job_of(waits)
    while not job.log(1).exists() or not job.log(1).read_text():
        assert job.state() is JobState.RUNNING
        time.sleep(0.02)
    with pytest.raises(TimeoutError):
        job.wait(0.2)
    job.cancel()
    assert job.wait(120).exit_code != 0 and job.state() is JobState.CANCELLED
    for path in (good.path / "job").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((good.path / "job").stat().st_mode) == 0o700


@pytest.fixture
def under_way(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of `echelon run --name busy` that goes on until a file `go` appears."""
    (tmp_path / "train.py").write_text(
        "import os, time\nprint('begun', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "echelon", "run", "--ranks", "1", "--name", "busy", "train.py"],
        cwd=tmp_path,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"begun\n"
        yield process
    finally:
        (tmp_path / "go").touch()
        process.wait(120)
        process.stdout.close()


def test_submit_into_the_folder_of_a_run_that_is_under_way_is_refused_and_changes_nothing(
    under_way: subprocess.Popen[bytes], tmp_path: Path, echelon_command: Any
) -> None:
    before = (tmp_path / "runs/busy/run.json").read_text()
    said = echelon_command("submit", "--to", "local", "--name", "busy", "train.py")
    assert said.returncode == 2 and f"run busy is under way: process {under_way.pid} on " in said.stderr
    assert (tmp_path / "runs/busy/run.json").read_text() == before
    assert not (tmp_path / "runs/busy/job/job.json").exists()
    assert os.listdir(tmp_path / "runs/busy/attempts") == ["000"]


@pytest.mark.full
def test_a_submitted_job_that_finds_its_folder_in_use_leaves_it_alone(
    under_way: subprocess.Popen[bytes], tmp_path: Path, echelon_command: Any
) -> None:
    """As when a run was begun while the job waited in its queue: the node takes the lock."""
    run = RunDir(tmp_path / "runs" / "busy")
    job = LocalLauncher(cwd=tmp_path).submit(JobSpec(str(tmp_path / "train.py")), run)
    assert job.wait(120).exit_code == 1
    assert f"run busy is under way: process {under_way.pid} on " in (run.path / "job" / "output.log").read_text()
    assert os.listdir(run.path / "attempts") == ["000"] and not run.exit_json.exists()
    (tmp_path / "go").touch()
    assert under_way.wait(120) == 0
    assert [(read_json(run.exit_json) or {})["exit_code"]] == [0]


@pytest.mark.full
def test_a_start_that_is_refused_is_not_the_success_of_the_one_before(tmp_path: Path) -> None:
    """Both by one process, as by a scheduler of one's own; or by two that have ended, which leaves both to process 1."""
    script, run = tmp_path / "train.py", RunDir(tmp_path / "runs" / "again")
    script.write_text("")
    codes = []
    for _ in range(2):
        run.path.mkdir(parents=True, exist_ok=True)
        codes.append(LocalLauncher(cwd=tmp_path).submit(JobSpec(str(script)), run).wait(120).exit_code)
        script.unlink(missing_ok=True)
    assert codes == [0, 1]
    ends = [read_json(run.path / "attempts" / n / "exit.json") or {} for n in ("000", "001")]
    assert [end["exit_code"] for end in ends] == [0, 1] and "does not find" in ends[1]["stopped"]


@pytest.mark.full
def test_a_run_in_the_folder_of_a_job_that_runs_is_refused(tmp_path: Path, echelon_command: Any) -> None:
    (tmp_path / "train.py").write_text("import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\n")
    assert echelon_command("submit", "--to", "local", "--name", "busy", "train.py").returncode == 0
    job = job_of(RunDir(tmp_path / "runs" / "busy"))
    wait_until(job.log().exists, "the job runs")
    said = echelon_command("run", "--ranks", "1", "--name", "busy", "train.py")
    (tmp_path / "go").touch()
    assert said.returncode == 2 and f"run busy is under way: process {job.id} on " in said.stderr
    assert job.result(120).exit_code == 0 and os.listdir(tmp_path / "runs/busy/attempts") == ["000"]


@pytest.mark.full
def test_of_several_that_submit_by_one_name_at_once_one_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nopen(f'began-{os.getpid()}', 'w')\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    )
    command = [sys.executable, "-m", "echelon", "submit", "--to", "local", "--name", "twin", "train.py"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": clean_environment(), "text": True, "stdin": subprocess.DEVNULL}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) for _ in range(3)]
    said = [process.communicate(timeout=120)[1] for process in started]
    job = job_of(RunDir(tmp_path / "runs" / "twin"))
    wait_until(lambda: list(tmp_path.glob("began-*")), "the job runs")
    (tmp_path / "go").touch()
    assert job.result(120).exit_code == 0
    assert sorted(process.returncode for process in started) == [0, 2, 2], said
    assert len(list(tmp_path.glob("began-*"))) == 1 and os.listdir(tmp_path / "runs/twin/attempts") == ["000"]
    assert all("run twin" in text for text, process in zip(said, started, strict=True) if process.returncode == 2)


def test_nodes_meet_through_a_private_file_and_not_through_an_older_one(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "a", begin=False)
    first = nodes.meet(run, "7.0", 0, ["localhost", "localhost"])
    second = nodes.meet(run, "7.0", 1, ["localhost", "localhost"])
    assert first.listener is not None
    assert first.listener.getsockname() == (second.host, second.port) == ("127.0.0.1", first.port)
    assert (second.token, second.attempt, second.interface) == (first.token, 0, "lo") and len(first.token) == 32
    assert stat.S_IMODE(nodes.meeting_path(run, "7.0").stat().st_mode) == 0o600
    first.listener.close()
    with refused(EchelonError):
        nodes.meet(run, "7.1", 1, ["localhost", "localhost"], timeout_s=0.1)
    again = nodes.meet(run, "7.1", 0, ["localhost", "localhost"])
    assert again.listener is not None and again.attempt == 1 and again.token != first.token
    again.listener.close()


def _ends(tmp_path: Path, name: str, *ends: dict[str, Any] | None) -> RunDir:
    run = RunDir.create(tmp_path, name, begin=False)
    write_spec(run, JobSpec("train.py", ranks=2, nodes=len(ends)), launcher="slurm", id="7")
    meeting = nodes.meet(run, "7.0", 0, ["localhost"] * len(ends))
    assert meeting.listener is not None
    meeting.listener.close()
    for n, end in enumerate(ends):
        if end is not None:
            write_json(RunDir(run.path).node_exit(n), {"exit_code": 0, "stopped": None, "ranks": {}, **end})
    return run


def test_the_last_word_is_of_all_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    culprit = Failure(3, 1, 2_000, "ValueError", "planted", traceback="ValueError: planted").as_json()
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection reset by peer"
    victim = Failure(0, 1, 1_000, "RuntimeError", "x", traceback=lost).as_json()
    cases: list[tuple[int, tuple[Any, ...]]] = [
        (0, ({}, {})),
        (75, ({"exit_code": 75}, {})),
        (1, ({"exit_code": 1, "ranks": {"0": victim}}, {"exit_code": 1, "ranks": {"3": culprit}})),
        (137, ({}, None)),
    ]
    for number, (code, ends) in enumerate(cases):
        run = _ends(tmp_path, f"r{number}", *ends)
        assert finish_job(run, 137 if None in ends else 0, "7.0") == code
    said = capsys.readouterr().err
    assert "rank 3 failed first" in said and "ValueError: planted" in said and "ended without a word" in said
    stood = (
        {"0": {"at": [6, 7, 0, 21], "stopped": False, "where": ""}},
        {"3": {"at": [6, 7, 0, 21], "stopped": True, "where": ""}},
    )
    text = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv operation to complete"
    waited = Failure(0, 1, 1_000, "RuntimeError", text, traceback=f"RuntimeError: {text}").as_json()
    run = _ends(
        tmp_path, "hangs", {"exit_code": 1, "ranks": {"0": waited}, "seen": stood[0]}, {"exit_code": 143, "seen": stood[1]}
    )
    assert finish_job(run, 143, "7.0") == 1
    said = capsys.readouterr().err
    assert "rank 3 stopped, in update 7" in said and "failed first" not in said and text in said
    run = _ends(tmp_path, "cancelled", {"exit_code": 75}, {"exit_code": 75})
    (run.path / "job" / "cancelled").touch()
    assert finish_job(run, 0, "7.0") == 143
    assert finish_job(run, 1, "8.0") == 1  # another start, which wrote nothing


def test_what_a_node_refused_is_the_last_word_and_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "ask", lambda job: (JobState.FAILED, "NonZeroExitCode"))
    run = _ends(tmp_path, "one", {}, None)
    refuse(run, "7.0", 1, "node2 cannot go to /here: No such file or directory.")
    assert finish_job(run, 1, "7.0") == 1
    with pytest.raises(RankFailedError, match=r"job 7: failed: .*node2 cannot go to /here"):
        job_of(run).result(1)
    run = RunDir.create(tmp_path, "none", begin=False)
    write_spec(run, JobSpec("train.py", nodes=2), launcher="slurm", id="7")
    for number in range(2):
        refuse(run, "7.1", number, "2 nodes were submitted, but this step has 1")
    assert finish_job(run, 1, "7.1") == 1
    with pytest.raises(RankFailedError, match="2 nodes were submitted, but this step has 1"):
        job_of(run).result(1)


def test_a_job_that_cannot_begin_says_why(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    run = RunDir.create(tmp_path / "runs", "a", begin=False)
    job = LocalLauncher(cwd=tmp_path / "gone").submit(JobSpec(str(script)), run)
    with pytest.raises(RankFailedError, match=r"cannot go to .*gone: No such file or directory"):
        job.result(120)
    run = RunDir.create(tmp_path / "runs", "b", begin=False)
    job = LocalLauncher(cwd=tmp_path).submit(JobSpec(str(tmp_path / "deleted.py")), run)
    with pytest.raises(RankFailedError, match=r"does not find .*deleted\.py"):
        job.result(120)


def test_starts_that_come_no_further_are_not_repeated_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def start(run: RunDir, step: int | None, saved: int | None) -> int:
        attempt = len(list((run.path / "attempts").glob("*")))
        nodes.meet(run, f"7.{attempt}", 0, ["localhost"])
        here = RunDir(run.path, attempt)
        if step is not None:
            here.events(0).write_text(json.dumps({"event": "train_start", "step": step}) + "\n")
        if saved is not None:
            (run.checkpoints / f"step-{saved:08d}").mkdir()
        write_json(here.exit_json, {"exit_code": 75, "first_failure": None})
        return finish_job(run, 0, f"7.{attempt}")

    cases: dict[str, tuple[list[tuple[int | None, int | None]], int]] = {
        "in-vain": ([(0, 2), (2, 4), (4, None), (4, None), (4, None)], 1),
        "saves": ([(0, 2), (0, 4), (0, 6), (0, 8)], 75),
        "moves": ([(0, None), (2, None), (4, None), (6, None)], 75),  # its checkpoints are elsewhere
        "silent": ([(None, None)] * 5, 75),  # no loop of ours: nobody knows
    }
    for name, (starts, last) in cases.items():
        run = RunDir.create(tmp_path, name, begin=False)
        write_spec(run, JobSpec("train.py"), launcher="slurm", id="7")
        codes = [start(run, *each) for each in starts]
        assert codes == [75] * (len(starts) - 1) + [last], name
    assert "3 starts in a row began at update 4 and left no newer checkpoint than step-00000004" in capsys.readouterr().err


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of Slurm's that write down what they were asked; the folder of what they wrote."""
    wrote = tmp_path / "asked"
    wrote.mkdir()
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "scontrol"):
        said = "sbatch: Job 1 to start" if name == "sbatch" else ""
        (folder / name).write_text(
            f"#!/bin/bash\nenv | grep ^SBATCH_ | sort > {wrote}/{name}.$$\n"
            f'[ "$1" = --parsable ] && echo 7 || echo "{said}" >&2\n'
            f'[ {name} = scontrol ] && echo "JobId=$4 JobState=PENDING Reason=Resources" || true\n'
        )
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return wrote


@pytest.mark.parametrize("options", [[], ["--partition", "small"]])
def test_a_dry_run_asks_slurm_for_what_submit_asks_for(
    fake_slurm: Path, tmp_path: Path, echelon_command: Any, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    for name in ("ACCOUNT", "PARTITION", "OUTPUT"):  # the last is the script's to say
        monkeypatch.setenv(f"SBATCH_{name}", "mine")
    for more in (["--dry-run"], []):
        said = echelon_command("submit", *options, *more, "train.py")
        assert said.returncode == 0, said.stderr
    asked = [path.read_text().split() for path in fake_slurm.glob("sbatch.*")]
    assert asked == [["SBATCH_ACCOUNT=mine"] if options else ["SBATCH_ACCOUNT=mine", "SBATCH_PARTITION=mine"]] * 2


def test_for_each_row_of_jobs_slurm_is_asked_once(fake_slurm: Path, tmp_path: Path, echelon_command: Any) -> None:
    for number in range(3):
        run = RunDir.create(tmp_path / "runs", f"r{number}", begin=False)
        write_spec(run, JobSpec("train.py"), launcher="slurm", id=f"{number}")
    said = echelon_command("jobs")
    rows = [line.split() for line in said.stdout.splitlines()[1:]]
    assert sorted((row[0], row[1], row[2], row[-1]) for row in rows) == [
        (f"r{n}", f"{n}", "pending", "Resources") for n in range(3)
    ]
    assert len(list(fake_slurm.glob("scontrol.*"))) == 3


EXPIRED = "srun: error: Task launch for StepId=7.0 failed on node n2: Job credential expired\n"


@pytest.mark.parametrize("meets", [False, True])
def test_a_start_that_never_ran_is_queued_again_once_with_what_srun_said(tmp_path: Path, meets: bool) -> None:
    """Of all nodes, or of one, for which the first waited."""
    run = RunDir.create(tmp_path, "r", begin=False)
    write_spec(run, JobSpec("train.py", ranks=2, nodes=2), launcher="slurm", id="7")
    codes = []
    for start in range(3):
        if meets:
            listener = nodes.meet(run, f"7.{start}", 0, ["localhost"] * 2).listener
            assert listener is not None
            listener.close()
        with open(run.path / "job" / "output.log", "a") as output:
            output.write(EXPIRED.replace("n2", f"n{start}"))
        codes.append(finish_job(run, 1, f"7.{start}", requeues=True))
        stopped = str((read_json(RunDir(run.path, start).exit_json) or {})["stopped"])
        assert f"failed on node n{start}: Job credential expired" in stopped and "out of memory" not in stopped
        with open(run.path / "job" / "output.log", "a") as output:
            output.write(f"echelon: {stopped}\n")
    assert codes == [75, 1, 75]  # the third is somebody's who has submitted it again


@pytest.mark.parametrize("how", ["ran", "refused", "fine", "cancelled"])
def test_a_start_that_ran_or_was_refused_is_not_queued_again(tmp_path: Path, how: str) -> None:
    run = _ends(tmp_path, "r", {"exit_code": 0} if how == "fine" else None, None)
    (run.path / "job" / "output.log").write_text("srun: error: n2: task 1: Killed\n")
    if how == "ran":
        RunDir(run.path).log(2).touch()
    elif how == "refused":
        refuse(run, "7.0", 1, "n2 does not find train.py")
    elif how == "cancelled":
        (run.path / "job" / "cancelled").touch()
    assert finish_job(run, 137, "7.0", requeues=True) == (143 if how == "cancelled" else 137)
    assert how == "refused" or "n2: task 1: Killed" in str((read_json(RunDir(run.path).exit_json) or {})["stopped"])


def test_the_state_of_a_job_that_slurm_has_forgotten_is_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _ends(tmp_path, "r", {}, {})
    monkeypatch.setattr(commands, "ask", lambda job: (None, ""))
    assert job_of(run).state() is JobState.LOST
    finish_job(run, 0, "7.0")
    assert job_of(run).state() is JobState.DONE
    monkeypatch.setattr(commands, "ask", lambda job: (JobState.PENDING, "PENDING: Resources"))
    assert job_of(run).state() is JobState.PENDING and job_of(run).why() == "PENDING: Resources"
