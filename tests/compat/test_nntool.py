"""nntool.slurm by its names, where no cluster is needed. Its page runs on a real Slurm in tests/slurm."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import echelon as ech
from echelon.common.errors import ClusterError, RankFailedError, UsageError
from echelon.compat.nntool.slurm import Job, SlurmArgs, SlurmConfig, SlurmFunction, slurm_fn, slurm_function, slurm_launcher
from tests.conftest import clean_environment
from tests.kit.refusals import refused

# What nntool 2.2.0 publishes.
PUBLISHED = "SlurmConfig SlurmArgs SlurmFunction slurm_fn slurm_function slurm_launcher"
ELSEWHERE = "Task DistributedTaskConfig PyTorchDistributedTask"


def plain_add(a: int, b: int = 1) -> int:
    return a + b


@slurm_fn
def add(a: int, b: int = 1) -> int:
    print("adding")
    if b < 0:
        raise KeyError("planted")
    return a + b


def test_published_names_are_present_or_say_what_takes_their_place() -> None:
    module = importlib.import_module("echelon.compat.nntool.slurm")
    assert set(PUBLISHED.split()) <= set(module.__all__) and all(hasattr(module, name) for name in module.__all__)
    for name in ELSEWHERE.split():
        with refused(UsageError):
            getattr(module, name)
    assert not hasattr(module, "nothing_of_the_kind")
    assert SlurmArgs is SlurmConfig and isinstance(add, SlurmFunction)


@pytest.mark.full
def test_submitting_works_without_torch() -> None:
    modules = (
        "echelon.compat.nntool.slurm, echelon.compat.dragon.ai.collective_group, echelon.compat.dragon.infrastructure.policy"
    )
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, timeout=180)
    assert done.stdout == "False\n", done.stderr


def test_the_mode_run_gives_the_functions_value(tmp_path: Path) -> None:
    """echelon's own `slurm_fn` gives a job in each mode."""
    config = SlurmConfig(partition="PARTITION", output_parent_path=str(tmp_path))
    assert add[config](1, b=2) == 3 and add[config].submit(1) == 2 and add(1) == 2
    assert add[config].map_array([1, 2], [10, 20]) == [11, 22]
    assert add[{"mode": "run"}](3) == 4 and slurm_function(plain_add)(config)(1) == 2
    assert ech.slurm_fn(plain_add)[config](1).result() == 2
    with pytest.raises(KeyError, match="planted"):
        add[config](1, b=-1)
    job = add.configure({"mode": "debug"})(5)
    assert isinstance(job, Job) and job.result() == 6 and job.state == "COMPLETED"
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.usefixtures("forked_programs")
def test_the_mode_local_has_ended_when_the_call_returns(tmp_path: Path) -> None:
    config = SlurmConfig(mode="local", output_parent_path=str(tmp_path), pack_code=False)
    job = add[config](1, b=2)
    assert job.job.done()  # nobody has waited for it
    assert (job.state, job.result(), job.results(), job.exception(), job.num_tasks) == ("COMPLETED", 3, [3], None, 1)
    assert job.job_id == job.job.id and "adding" in job.stdout() and job.run.path.parent == tmp_path / "slurm"
    assert add[config].afterok(job).on_condition([job], "afterany")(4).result() == 5
    with pytest.raises(RankFailedError, match="planted"):
        add[config](1, b=-1)
    with refused(ClusterError):
        add[config].afternotok(job)(1)


def test_a_config_can_be_changed_and_is_checked_when_it_is_used(tmp_path: Path) -> None:
    config = SlurmConfig(timeout_min=sys.maxsize)
    assert config.timeout_min is None
    config.job_name, config.output_parent_path = "another", str(tmp_path)
    assert config.set_output_path("there").output_path == Path("there/slurm") and config.output_path == tmp_path / "slurm"
    assert add[config].config.job_name == "another" and add[config](1) == 2
    config.mode = "exec"
    with refused(ClusterError):
        add[config]


def test_submitits_names_reach_the_script() -> None:
    config = SlurmConfig(mode="slurm", extra_submit_kwargs={"slurm_account": "me", "slurm_array_parallelism": 3})
    assert config.options().parallel == 3 and config.options().more == {"account": "me"}


def test_a_function_takes_options_in_nntools_order_and_under_its_names() -> None:
    config, argv = SlurmConfig(mode="slurm"), sys.argv[1:]
    given = {"comment": "x"}, {"slurm_account": "y"}, {"VARIABLE": "z"}
    for configured in (
        add[(config, *given, argv)],
        add.configure(config, slurm_params_kwargs=given[0], slurm_submit_kwargs=given[1], slurm_task_kwargs=given[2]),
    ):
        c = configured.config
        assert (c.extra_params_kwargs, c.extra_submit_kwargs, c.extra_task_kwargs) == given
        assert configured.is_configured() and not configured.is_distributed()
    with refused(UsageError):
        add.configure(config, system_argv=["--other"])


@dataclass
class Arguments:
    rate: float = 0.5
    slurm: SlurmConfig = field(default_factory=SlurmConfig)


def parse(kind: type[Any], *, rate: float) -> Any:
    return kind(rate)


def test_a_launcher_parses_the_command_line() -> None:
    @slurm_launcher(Arguments, parser=parse, rate=0.25)
    def main(args: Arguments) -> float:
        return args.rate

    assert main() == 0.25 and main(Arguments(2.0)) == 2.0
    with refused(UsageError):
        slurm_launcher(Arguments, parser=parse, slurm_key="cluster", rate=1.0)
    with refused(UsageError):
        slurm_launcher(Arguments, parser="argparse")
