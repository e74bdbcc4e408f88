"""`slurm_fn` without a cluster: what a config may say, what a launch command is, and jobs in the background of this machine."""

from __future__ import annotations

import json
import os
import pdb
import pickle
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon import SlurmConfig, slurm_fn
from echelon.common.errors import ClusterError, EchelonError, LauncherEnvironmentError, LaunchError, RankFailedError, UsageError
from echelon.contracts.expected_world import ExpectedWorld
from echelon.contracts.rank import RankInfo
from echelon.contracts.run_dir import RunDir, write_json
from echelon.launcher import calls
from echelon.launcher.calls import Call, load_value, pack, write_call, write_value
from echelon.launcher.cluster.background import LocalLauncher
from echelon.launcher.cluster.function_job import FunctionJob
from echelon.launcher.cluster.jobs import job_of
from echelon.launcher.functions import launch_command
from echelon.launcher.job import JobSpec
from echelon.launcher.protocol import JobState, write_spec
from tests.conftest import clean_environment
from tests.kit.refusals import refused

pytestmark = pytest.mark.usefixtures("forked_programs")

TORCHRUN = (
    "torchrun --nnodes {num_machines} --nproc-per-node {num_processes} --node-rank {machine_rank} "
    "--master-addr {main_process_ip} --master-port {main_process_port} main.py"
)


@slurm_fn
def double(x: int, fail: bool = False) -> int:
    """Twice x."""
    if fail:
        raise KeyError("planted")
    return 2 * x


@slurm_fn
def joined(x: int) -> tuple[int, int, int]:
    import torch
    import torch.distributed as dist

    import echelon as ech

    ech.init_from_env()
    total = torch.ones(1)
    dist.all_reduce(total)
    if x < 0 and ech.RankInfo().rank == 1:
        raise ValueError("planted on rank", 1)
    return x, ech.RankInfo().rank, int(total)


Program = Callable[..., Any]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """`program(body)` runs a script of this body, which ends with a print of JSON."""

    def run(body: str, *args: str, prelude: str = "", git: bool = False, path: Path | None = None) -> Any:
        script = tmp_path / "main.py"
        script.write_text(
            "import json, os, signal, sys, time\nfrom dataclasses import replace\nfrom pathlib import Path\n"
            "import echelon as ech\nfrom echelon import SlurmConfig, slurm_fn\n"
            'config = SlurmConfig(mode="local")\n'
            'alone = replace(config, distributed_launch_command="python main.py")\n'
            + textwrap.dedent(prelude)
            + 'if __name__ == "__main__":\n'
            + textwrap.indent(textwrap.dedent(body), "    ")
        )
        if git:
            for words in (["init", "-q"], ["add", "main.py"]):
                subprocess.run(["git", *words], cwd=tmp_path, check=True)
        said = subprocess.run(
            [sys.executable, str(script), *args],
            cwd=tmp_path,
            env=clean_environment() | ({"PATH": f"{path}{os.pathsep}{os.environ['PATH']}"} if path else {}),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert said.returncode == 0, said.stderr
        return json.loads(said.stdout.splitlines()[-1])

    return run


def test_without_a_config_it_is_a_function_and_with_one_of_mode_run_it_is_called_here() -> None:
    assert double(3) == 6 and double.__name__ == "double" and double.__doc__ == "Twice x."
    for configured in (double[SlurmConfig()], double[{"mode": "run"}], double.configure(mode="debug")):
        job = configured(4)
        assert (job.result(), job.results(), job.state(), job.done()) == (8, [8], JobState.DONE, True)
    assert [job.result() for job in double[SlurmConfig()].map_array([1, 2, 3])] == [2, 4, 6]
    with pytest.raises(KeyError, match="planted"):
        double[SlurmConfig()](1, fail=True)


def test_a_configured_function_takes_changes_and_a_secret_is_not_shown() -> None:
    base = SlurmConfig(distributed_launch_command="torchrun main.py", extra_task_kwargs={"TOKEN": "canary"})
    configured = double.configure(base, use_distributed_env=True)
    assert configured.config.use_distributed_env and not base.use_distributed_env and "canary" not in repr(configured)
    with refused(ClusterError):
        double.configure(base, nodes=2)
    with refused(LaunchError) as caught:
        double.configure(base, extra_task_kwargs={"TOKEN": b"canary"})
    assert "canary" not in str(caught.value)


def test_debug_stops_in_the_debugger_where_somebody_sits(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[Any] = []
    monkeypatch.setattr(pdb, "post_mortem", stopped.append)
    for mode, terminal, stops in (("debug", True, 1), ("debug", False, 0), ("run", True, 0)):
        stopped.clear()
        monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"isatty": lambda self, answer=terminal: answer})())
        with pytest.raises(KeyError):
            double[{"mode": mode}](1, fail=True)
        assert len(stopped) == stops


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mode": "exec"}, "mode must be one of run, debug, local, slurm, got 'exec'"),
        ({"num_of_nodes": 2}, "no field 'num_of_nodes'. Is it num_of_node?"),
        ({"num_of_node": 0}, "num_of_node must be a whole number of at least 1, got 0"),
        ({"tasks_per_node": "2"}, "tasks_per_node must be a whole number of at least 1, got '2'"),
        ({"cpus_per_task": True}, "cpus_per_task must be a whole number of at least 1, got True"),
        ({"gpus_per_task": -1}, "gpus_per_task must be a whole number of at least 0, got -1"),
        ({"timeout_min": 0}, "timeout_min must be a whole number of at least 1, got 0"),
        ({"job_name": "a\nrm -rf ~"}, "control characters"),
        ({"job_name": "a\x1b[2J"}, "control characters"),
        ({"job_name": "a\u2028b"}, "control characters"),
        ({"job_name": " "}, "job_name"),
        ({"partition": "a b"}, "--partition must be a word"),
        ({"node_list": "$(x)"}, "--nodelist"),
        ({"mem": "1;x"}, "--mem"),
        ({"setup": "module load cuda"}, "a list of strings"),
        ({"setup": ["a\nb"]}, "control characters"),
        ({"use_distributed_env": True}, "needs a distributed_launch_command"),
        ({"distributed_launch_command": "x {rank}"}, "must be among {num_processes}, {num_machines}, {machine_rank}"),
        ({"distributed_launch_command": "a\nb"}, "one line"),
        ({"distributed_launch_command": "a 'b"}, "No closing quotation"),
        ({"distributed_launch_command": "cd x && torchrun main.py"}, "must do without a shell"),
        ({"extra_params_kwargs": {"array": "0-9"}}, "is set by echelon"),
        ({"extra_params_kwargs": {"cpus_per_task": 4}}, "has fields of its own"),
        ({"extra_params_kwargs": {"qos=x --wrap": "y"}}, "lowercase letters, digits and hyphens"),
        ({"extra_params_kwargs": {"comment": "a\n#SBATCH --uid=0"}}, "control characters"),
        ({"array_parallelism": 0}, "array_parallelism must be a whole number of at least 1, got 0"),
        ({"extra_task_kwargs": {"A": 1}}, "must be a string, as all environment variables, got int"),
    ],
)
def test_what_cannot_work_is_said_when_the_config_is_made(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        double[fields]
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_launch_command_is_words_in_which_five_names_mean_something() -> None:
    words = launch_command.parse(
        """accelerate launch --ip={main_process_ip} --json '{"a": {"b": [1]}, "c": "{x.__class__}"}' "a b; rm -rf ~" """
    )
    values = {"main_process_ip": "{machine_rank}; x", "machine_rank": 1}
    made = launch_command.substitute(words, values)
    assert made == ["accelerate", "launch", "--ip={machine_rank}; x", "--json", words[4], "a b; rm -rf ~"]
    assert json.loads(words[4]) == {"a": {"b": [1]}, "c": "{x.__class__}"}  # str.format would raise, or look attributes up
    assert launch_command.substitute(["/home/{me}/main.py"], values) == ["/home/{me}/main.py"]  # a path that has braces
    every = launch_command.substitute(
        [f"{{{name}}}" for name in launch_command.PLACEHOLDERS], dict.fromkeys(launch_command.PLACEHOLDERS, 7)
    )
    assert every == ["7"] * 5


def test_the_script_is_what_the_config_says_and_a_name_is_a_name(tmp_path: Path) -> None:
    name = "a\"b'c\\d; touch x #y $(touch x) `touch x` %j"
    config = SlurmConfig(
        mode="slurm",
        job_name=name,
        num_of_node=2,
        tasks_per_node=2,
        processes_per_task=3,
        cpus_per_task=4,
        gpus_per_task=1,
        timeout_min=3,
        mem="4G",
        node_list="n[1-3]",
        setup=["module load cuda", "export X='a b'"],
        extra_params_kwargs={"mail_type": "END", "exclusive": True, "comment": "a b; $HOME", "account": "me", "x": None},
        extra_task_kwargs={"TOKEN": "canary"},
    ).set_output_path(tmp_path / "runs")
    script = double[config].script(1)
    lines = script.splitlines()
    header = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    for wanted in (f'job-name="{quoted}"', "nodes=2", "cpus-per-task=8", "gpus-per-node=2", "time=0-00:03:00", "signal=USR1@90"):
        assert wanted in header, wanted
    assert {"mem=4G", "nodelist=n[1-3]", 'mail-type="END"', "exclusive", 'comment="a b; $HOME"', 'account="me"'} <= set(header)
    srun = next(n for n, line in enumerate(lines) if line.startswith("srun "))
    assert lines.index("module load cuda") < lines.index("export X='a b'") < srun and "--call-sha256 " in lines[srun]
    assert "canary" not in script and not (tmp_path / "runs").exists()
    (tmp_path / "script").write_text(script)
    subprocess.run(["bash", "-n", str(tmp_path / "script")], check=True)


@pytest.mark.full
def test_ranks_in_the_background_give_values_and_the_failing_ones_exception(tmp_path: Path) -> None:
    config = SlurmConfig(mode="local", tasks_per_node=2, pack_code=False).set_output_path(tmp_path / "runs")
    good, bad = joined[config](5), joined[config](-5)  # a second job in the same process is one
    assert good.result(120) == [(5, 0, 2), (5, 1, 2)] and good.ranks == 2 and good.state() is JobState.DONE
    with pytest.raises(RankFailedError, match="rank 1 failed first") as raised:
        bad.result(120)
    assert raised.value.rank == 1 and "in joined" in str(raised.value)
    assert isinstance(raised.value.__cause__, ValueError) and raised.value.__cause__.args == ("planted on rank", 1)
    assert job_of(good.run).result().exit_code == 0  # a run like others
    one = double.configure(config, tasks_per_node=1)
    after = one.afterok(good).afternotok(bad)
    assert after(4).result(120) == 8 and one.conditions == ()  # a new one: the other waits for nothing
    with refused(ClusterError):
        one.afterok([bad])(1)
    for path in (tmp_path / "runs").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_conditions_and_columns_are_checked() -> None:
    configured = double[SlurmConfig()]
    for wrong in (
        lambda: configured.afterok(),
        lambda: configured.on_condition([object()]),
        lambda: configured.on_condition([], "x"),
    ):
        with pytest.raises(UsageError):
            wrong()
    for columns in ([], [[]], [[1], [1, 2]]):
        with refused(ClusterError):
            configured.map_array(*columns)


@pytest.mark.full
def test_a_call_that_was_tampered_with_is_not_loaded(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "a", begin=False)
    (run.path / "job").mkdir(mode=0o700)
    file, evidence = run.path / "job" / "call.pkl", tmp_path / "it-ran"
    sha256 = write_call(file, pack(Call(double, [((4,), {})])))
    file.write_bytes(pickle.dumps(_Touches(str(evidence))))
    job = FunctionJob(LocalLauncher(cwd=tmp_path).submit(JobSpec(str(file), "call", sha256=sha256), run))
    with pytest.raises(RankFailedError, match="is not the call that was submitted"):
        job.result(120)
    assert not evidence.exists()
    job = FunctionJob(LocalLauncher(cwd=tmp_path).submit(JobSpec(str(file), "call"), run))
    with pytest.raises(RankFailedError, match="only with --call-sha256"):
        job.result(120)
    assert not evidence.exists()
    pickle.loads(file.read_bytes())  # and it would have run
    assert evidence.exists()


class _Touches:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


KEY = "ab" * 32


def test_a_value_is_loaded_only_with_the_seal_of_its_job_and_place(tmp_path: Path) -> None:
    """A pickle of the user's own, such as a downloaded one, can be moved to where a value is expected."""
    evidence, (first, second) = tmp_path / "it-ran", (tmp_path / "attempt" / f"value.rank{n}.pkl" for n in range(2))
    first.parent.mkdir()
    planted = (
        lambda: first.write_bytes(pickle.dumps(_Touches(str(evidence)))),
        lambda: first.write_bytes(bytes(32) + pickle.dumps(_Touches(str(evidence)))),
        lambda: write_value(_Touches(str(evidence)), first, "cd" * 32),  # of another job
        lambda: (write_value(_Touches(str(evidence)), second, KEY), second.rename(first)),  # of another rank
    )
    for plant in planted:
        first.unlink(missing_ok=True)
        plant()
        first.chmod(0o600)
        with refused(EchelonError):
            load_value(first, KEY)
        assert calls.load_exception(first, KEY) is None
    assert not evidence.exists()
    write_value([1.5, "x"], first, KEY)
    assert load_value(first, KEY) == [1.5, "x"]


def test_values_come_from_files_that_only_the_user_can_have_written(tmp_path: Path) -> None:
    path, other = tmp_path / "value.pkl", tmp_path / "other.pkl"
    write_value(7, path, KEY)
    assert load_value(path, KEY) == 7 and stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["value.pkl"]
    other.symlink_to(path)
    with pytest.raises(OSError):
        load_value(other, KEY)
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with refused(EchelonError):
            load_value(path, KEY)
    path.chmod(0o600)
    os.mkfifo(tmp_path / "pipe")
    with refused(EchelonError):
        load_value(tmp_path / "pipe", KEY)
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
        with refused(EchelonError):
            load_value(path, KEY)
    with pytest.raises(Exception, match=r"pickle|local object"):  # the second by Python 3.13
        write_value(lambda: 0, path, KEY)
    assert sorted(os.listdir(tmp_path)) == ["other.pkl", "pipe", "value.pkl"]


LAUNCHED = """
HEARD = signal.getsignal(signal.SIGUSR1)

@slurm_fn
def main(x, *, how="ends"):
    Path("traces").mkdir(exist_ok=True)
    (Path("traces") / f"{x}-{os.getpid()}").touch()
    if how == "waits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    print("in", x, sys.argv[1:], getattr(HEARD, "name", None), flush=True)
    if how == "raises":
        raise ValueError("planted", x)
    if how == "exits":
        os._exit(0)
    while how == "waits":
        time.sleep(0.01)
    if how == "submits":
        return other[config](x).result(120)
    run = ech.evidence.RunDir.current()
    return x, ech.RankInfo().rank, os.path.basename(os.path.dirname(os.path.abspath(__file__))), str(run.path)

@slurm_fn
def other(x):
    return x
"""


@pytest.mark.full
def test_a_launch_command_runs_the_script_again_as_far_as_its_own_call(program: Program, tmp_path: Path) -> None:
    body = """
    before = dict(os.environ)
    first = main[config](1)                  # a job without a command is counted, too
    second = main[alone](first.result(120)[0] + 1)
    two = main.configure(config, tasks_per_node=2, distributed_launch_command=%r)(3)
    bad = main[alone](4, how="raises")
    last = main[alone](5, how="submits")
    (Path(__file__)).write_text("raise SystemExit('edited after it was submitted')")
    values = [job.result(100) for job in (first, second, two, last)]
    try:
        bad.result(120)
    except ech.EchelonError as error:
        failure = [str(error), repr(error.__cause__)]
    assert dict(os.environ) == before
    print(json.dumps([values, failure, second.log().read_text(), str(second.run.path)]))
    """
    values, failure, log, run = program(body % TORCHRUN, "--key", "a {b} c", prelude=LAUNCHED)
    assert (
        values[0][0] == 1
        and values[1] == [2, 0, "code", run]
        and [v[:2] for v in values[2]] == [[3, 0], [3, 1]]
        and values[3] == 5
    )
    assert log == "in 2 ['--key', 'a {b} c'] SIG_IGN\n"  # the script's own arguments; Slurm signals all processes
    assert "ValueError: ('planted', 4)" in failure[0] and "in main" in failure[0] and failure[1] == "ValueError('planted', 4)"
    traces = sorted(p.name.partition("-")[0] for p in (tmp_path / "traces").iterdir())
    assert traces == ["1", "2", "3", "3", "4", "5"]  # nothing ran twice
    assert len(list((tmp_path / "slurm").iterdir())) == 6  # and no rank submitted anything, but what the last was told to
    for path in (tmp_path / "slurm").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.full
def test_a_launch_command_is_of_the_interpreter_that_submits_not_of_the_shell(program: Program, tmp_path: Path) -> None:
    """`.venv/bin/python main.py`, and nothing activated: what stands first in PATH is another Python's."""
    for name in ("python", "torchrun"):
        other = tmp_path / "bin" / name
        other.parent.mkdir(exist_ok=True)
        other.write_text("#!/bin/sh\necho the other one; exit 9\n")
        other.chmod(0o755)
    body = """
    commands = {"python": "python main.py", "a shell": "sh -c 'python main.py'", "torchrun": %r}
    jobs = {k: main.configure(config, processes_per_task=1, distributed_launch_command=c)(0) for k, c in commands.items()}
    print(json.dumps({name: job.results(120) for name, job in jobs.items()}))
    """
    values = program(body % TORCHRUN, prelude=LAUNCHED, path=tmp_path / "bin")
    assert {name: [v[:2] for v in value] for name, value in values.items()} == {name: [[0, 0]] for name in values}


@pytest.mark.full
def test_a_launch_command_that_comes_to_nothing_says_why(program: Program) -> None:
    body = """
    commands = {
        "no program": "no-such-program main.py",
        "fails before": "python -c 'raise OSError(5, \\"planted\\")'",
        "another script": "python -c pass",
        "stumbles": "python -c 'import subprocess, sys; subprocess.run([\\"python\\", \\"main.py\\"]); sys.exit(3)'",
    }
    jobs = {name: main.configure(config, distributed_launch_command=words)(0) for name, words in commands.items()}
    jobs["leaves"] = main[alone](0, how="exits")
    said = {}
    for name, job in jobs.items():
        try:
            said[name] = str(job.result(120))
        except ech.EchelonError as error:
            said[name] = str(error)
    print(json.dumps(said))
    """
    said = program(body, prelude=LAUNCHED)
    assert "begins with 'no-such-program'" in said["no program"] and "nor on its PATH" in said["no program"]
    assert "OSError: [Errno 5] planted" in said["fails before"] and "before any rank came to the call" in said["fails before"]
    assert "ended with exit code 0 before any rank came to the call" in said["another script"]
    assert "ended without a word" in said["leaves"]
    assert said["stumbles"].startswith("(0, 0, ")  # over its own end: all that it was for is done


WORLDS = """
if len(sys.argv) > 1:                                # as a script may that joins before its call
    ech.init_from_env()

@slurm_fn
def main(x):
    import types
    if x == "a library":                             # which found another world in the environment than we did
        state = types.ModuleType("accelerate.state")
        state.is_initialized = lambda: True
        state.PartialState = lambda: types.SimpleNamespace(num_processes=1)
        sys.modules["accelerate.state"] = state
    (Path("traces") / x).touch()
    return ech.RankInfo().world_size
"""


@pytest.mark.full
def test_a_launch_command_that_starts_another_world_than_was_asked_for_fails_by_name(program: Program, tmp_path: Path) -> None:
    body = """
    two = replace(config, tasks_per_node=2)
    words = {"fewer": "python main.py", "more": %r, "before": "python main.py joins", "a library": %r, "all": %r}
    jobs = {name: main.configure(two, distributed_launch_command=word)(name) for name, word in words.items()}
    said = {}
    for name, job in jobs.items():
        try:
            said[name] = job.results(100)
        except ech.EchelonError as error:
            said[name] = str(error)
    print(json.dumps(said))
    """
    (tmp_path / "traces").mkdir()
    three, two = (f"torchrun --standalone --nproc-per-node {n} main.py" for n in (3, 2))
    said = program(body % (three, two, two), prelude=WORLDS)
    assert "rank 0 is in a world of 1, but 2 ranks were asked for (one node)" in said["fewer"]
    assert "The launch command was: python " in said["fewer"] and "torchrun --nnodes {num_machines}" in said["fewer"]
    assert "is in a world of 3, but 2 ranks were asked for" in said["more"]
    assert "rank 0 is in a world of 1, but 2 ranks were asked for" in said["before"] and "ech.init_from_env()" in said["before"]
    assert "Accelerate had joined 1 rank here when the function returned, but 2 ranks were asked for" in said["a library"]
    assert said["all"] == [2, 2]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["a library", "all"]  # nothing was trained for long


@pytest.mark.parametrize("said", ["x", "[1]", '{"ranks": 0, "nodes": 0, "command": ""}', '{"ranks": 2}', "[" * 99999])
def test_what_no_launcher_writes_is_named(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_ASKED", said)
    with refused(LauncherEnvironmentError):
        ExpectedWorld.from_env()


def test_a_world_of_its_own_on_every_node_is_no_world() -> None:
    asked = ExpectedWorld(4, 2, "accelerate launch --cpu main.py")
    env = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    asked.check(RankInfo.from_env({**env, "LOCAL_WORLD_SIZE": "2"}), {**env, "LOCAL_WORLD_SIZE": "2"})
    asked.check(RankInfo.from_env(env), env)  # a launcher that does not say it
    own = {**env, "LOCAL_WORLD_SIZE": "4"}
    with refused(LauncherEnvironmentError) as it:
        asked.check(RankInfo.from_env(own), own)
    assert "accelerate launch --cpu main.py" in str(it.value)


def test_fewer_values_than_ranks_are_a_failure_that_names_who_left_none(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "short")
    write_spec(run, JobSpec("main", "command", ranks=2, nodes=2), launcher="local", id=str(os.getpid()), began=0.0)
    write_json(run.exit_json, {"exit_code": 0, "first_failure": None})
    for rank in (0, 2):
        write_value(rank, str(run.attempt_path / f"value.rank{rank}.pkl"), str(job_of(run).verified()["key"]))
    with pytest.raises(RankFailedError, match="ranks 1, 3 exited with 0, but left no value"):
        FunctionJob(job_of(run)).results(1)


@pytest.mark.full
def test_a_script_that_comes_to_another_call_on_the_nodes_is_refused(program: Program) -> None:
    body = """
    job = (other if "ECHELON_CALL" in os.environ else main)[alone](0)
    try:
        print(json.dumps(str(job.result(120))))
    except ech.EchelonError as error:
        print(json.dumps(str(error)))
    """
    assert "called main when it was submitted, and calls other here" in program(body, prelude=LAUNCHED)


@pytest.mark.full
def test_signals_reach_the_ranks_of_a_launch_command(program: Program) -> None:
    """The request to save goes to the ranks and not to the command; a cancelled job ends."""
    body = """
    jobs = [main[alone](0, how="waits"), main[alone](1, how="waits")]
    for job in jobs:
        while not job.log().exists() or "in" not in job.log().read_text():
            assert not job.done()
            time.sleep(0.05)
    os.kill(int(jobs[0].id), signal.SIGUSR1)
    jobs[1].cancel()
    outcomes = [job.wait(120) for job in jobs]
    print(json.dumps([[outcome.exit_code, job.state().value, str(job.run.path)] for outcome, job in zip(outcomes, jobs)]))
    """
    asked, cancelled = program(body, prelude=LAUNCHED)
    assert "terminated" in (Path(cancelled[2]) / "attempts/000/rank0.log").read_text()
    assert asked[:2] == [75, "stopped"] and "asked the ranks to save" in (Path(asked[2]) / "job/output.log").read_text()
    assert cancelled[1] == "cancelled"


@pytest.mark.full
def test_a_map_in_the_background_has_a_job_for_each_element_also_under_a_launch_command(program: Program) -> None:
    body = """
    jobs = main[alone].map([4, 5])
    print(json.dumps([job.result(120)[0] for job in jobs]))
    """
    assert program(body, prelude=LAUNCHED) == [4, 5]


@pytest.mark.full
def test_the_copy_of_the_code_has_no_runs_in_it(program: Program, tmp_path: Path) -> None:
    body = """
    jobs = [main.configure(alone, exclude_code_folders=["data"], code_file_suffixes=[".py", ".txt"])(n) for n in range(2)]
    print(json.dumps([[*job.result(120), str(job.run.path)] for job in jobs]))
    """
    for file in ("data/a.txt", "more/b.txt", "more/c.bin"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("x")
    values = program(body, prelude=LAUNCHED, git=True)
    for *_, where, _, run in values:
        copy = Path(run) / "job" / "code"
        assert where == "code" and {str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()} == {"main.py", "more/b.txt"}


@pytest.mark.full
def test_a_function_of_a_session_is_sent_by_value(tmp_path: Path) -> None:
    body = """
import echelon as ech
factor = 3
@ech.slurm_fn
def times(x): return factor * x if x < 10 else times(x - 10)
print(times[{"mode": "local"}](14).result(120))
"""
    said = subprocess.run(
        [sys.executable, "-"], input=body, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=120
    )
    assert said.stdout == "12\n", said.stderr


@pytest.mark.full
def test_a_script_without_a_guard_does_not_submit_for_ever(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        "import echelon as ech\n@ech.slurm_fn\ndef main(): return 1\n"
        "try: print(main[{'mode': 'local'}]().result(120))\nexcept ech.EchelonError as error: print(error); raise\n"
    )
    said = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=120
    )
    assert 'under `if __name__ == "__main__":`' in said.stdout and len(list((tmp_path / "slurm").iterdir())) == 1


def test_nothing_of_a_launch_command_is_believed_from_a_strange_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ECHELON_CALL", "{}")
    with refused(LaunchError):
        double[SlurmConfig(mode="local").set_output_path(tmp_path / "runs")](1)
    assert double(2) == 4 and double[SlurmConfig()](2).result() == 4 and not (tmp_path / "runs").exists()
