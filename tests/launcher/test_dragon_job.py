"""A job on the real Dragon: the same folder, logs, values and exit codes as with every launcher."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.common.errors import RankFailedError
from echelon.contracts.run_dir import RunDir
from echelon.launcher.cluster.jobs import job_of
from echelon.launcher.dragon.launcher import DragonLauncher
from echelon.launcher.job import JobSpec
from echelon.launcher.protocol import JobState

STEPS = 60
PATIENCE_S = 300  # the runtime's own processes keep both cores busy

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("dragon") is None and not os.environ.get("ECHELON_REQUIRE_DRAGON"),
    reason="needs Dragon: pip install 'echelon[dragon]' (Linux on x86_64)",
)

TRAIN = """
import os, sys, time
import torch
import echelon as ech
from echelon.contracts.run_dir import RunDir

class Line(ech.AutoUnit):
    def compute_loss(self, state, data):
        if "fall" in sys.argv and ech.RankInfo().rank == 1:
            raise ValueError("planted")
        if "slow" in sys.argv and not os.path.exists("go"):
            open(f"trains{ech.RankInfo().rank}", "w").close()
            time.sleep(0.1)
        out = self.module(data[0])
        return torch.nn.functional.mse_loss(out, data[1]), out

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), None

ech.init_from_env()
torch.manual_seed(0)
x = torch.randn(64, 4, dtype=torch.float64)
loader = ech.Loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 16, seed=1)
run = RunDir.current()
unit = Line(module=torch.nn.Linear(4, 1, dtype=torch.float64), layout="ddp")
saver = ech.DistributedCheckpointSaver(run.checkpoints)
saver.restore_from_latest(run.checkpoints, unit, train_dataloader=loader)
ech.train(unit, loader, max_updates=60, callbacks=[saver])
info = ech.RankInfo()
print(f"rank {info.rank} of {info.world_size} trained to {unit.train_progress.num_steps_completed}", flush=True)
"""


def _submit(folder: Path, name: str, *args: str, ranks: int = 2) -> RunDir:
    run = RunDir.create(folder / "runs", name, begin=False)
    script = folder / "train.py"
    script.write_text(TRAIN)
    DragonLauncher(cwd=folder).submit(JobSpec(str(script), args=args, ranks=ranks, grace_s=20.0), run)
    return run


def _output(run: RunDir) -> str:
    return (run.path / "job" / "output.log").read_text()


@pytest.mark.full
def test_a_rank_that_falls_on_dragon_is_named(tmp_path: Path, echelon_command: Callable[..., Any]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    said = echelon_command("submit", "--to", "dragon", "--ranks-per-node", "2", "--name", "bad", "train.py", "fall")
    assert said.returncode == 0, said.stderr
    job = job_of(RunDir(tmp_path / "runs" / "bad"))
    with pytest.raises(RankFailedError, match="planted") as raised:
        job.result(PATIENCE_S)
    assert raised.value.rank == 1 and "in compute_loss" in str(raised.value)
    assert job.state() is JobState.FAILED


@pytest.mark.full
def test_a_script_is_stopped_on_dragon_with_a_checkpoint_and_goes_on(tmp_path: Path) -> None:
    run = _submit(tmp_path, "stop", "slow")
    job = job_of(run)
    while not all((tmp_path / f"trains{rank}").exists() for rank in range(2)):
        assert not job.state().has_ended, _output(run)
        time.sleep(0.1)
    job.cancel()
    assert job.wait(PATIENCE_S).exit_code != 0 and job.state() is JobState.CANCELLED
    [stopped_at] = [int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")]
    assert 0 < stopped_at < STEPS
    (run.path / "job" / "cancelled").unlink()
    (tmp_path / "go").touch()
    job = job_of(_submit(tmp_path, "stop", "slow"))
    assert job.result(PATIENCE_S).exit_code == 0 and job.state() is JobState.DONE
    assert f"rank 1 of 2 trained to {STEPS}" in job.log(1).read_text()
    assert f"from update {stopped_at}" in job.log(0).read_text()
