"""The largest micro-batch that fits is found by trying, and changes no number."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.common.errors import PlanError, RankFailedError
from echelon.loop.target import Target
from echelon.planner.largest_batch import Trial, largest_batch, trial_lines
from tests.kit.refusals import refused

Command = Callable[..., subprocess.CompletedProcess[str]]

# A hundred results of a KiB of a sample are kept. Rank 1 may have only so many MiB beside what it begins with.
SCRIPT = """
    import resource, sys
    import torch
    from torch import nn
    import echelon as ech

    mib, rows = map(int, sys.argv[1:3])
    ech.init_from_env()
    ech.seed(0)
    if mib and ech.RankInfo().rank == 1:
        data = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (data * 1024 + mib * 2**20,) * 2)
    model = nn.Sequential(nn.Linear(256, 256), *[nn.Tanh() for _ in range(100)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(2 * rows, 256))
    loader = ech.Loader(data, global_batch=rows)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="ddp")
    for (x,) in loader:
        with ech.window(model) as window:
            window.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    if ech.is_main():
        print("ended with", loader.accumulation, float(sum(p.double().square().sum() for p in model.parameters())))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def test_a_rank_that_runs_out_of_memory_has_all_take_smaller_micro_batches(script: str) -> None:
    seen: list[Trial] = []
    trials = largest_batch(Target(script=script, args=("240", "4800")), 2, on_trial=seen.append)
    assert seen == trials and trials[0].samples == 2400
    assert all("rank 1" in each.why and not each.peak for each in trials if not each.fits)
    best = min(each.micro_batches for each in trials if each.fits)
    assert best > 1 and max(each.micro_batches for each in trials if not each.fits) == best - 1  # of 1, 2, 3, 4, 5, 6
    assert all(each.samples == 2400 // each.micro_batches and each.peak > 2**27 for each in trials if each.fits)
    shown = trial_lines(trials)
    assert len(shown) == len(trials) + 1 and "fits" in shown[-1]


def test_what_fits_at_once_is_tried_once(script: str) -> None:
    assert [(each.micro_batches, each.fits) for each in largest_batch(Target(script=script, args=("0", "64")), 2)] == [(1, True)]


@pytest.mark.full
def test_run_finds_it_and_trains_the_same_numbers(script: str, echelon_command: Command) -> None:
    def ended(*words: str) -> tuple[int, float]:
        done = echelon_command("run", "--ranks", "2", *words)
        line = next(line for line in done.stdout.splitlines() if line.startswith("ended with"))
        return int(line.split()[2]), float(line.split()[3])

    plain, found = ended(script, "0", "4800"), ended("--find-batch", script, "240", "4800")
    assert plain[0] == 1 < found[0]
    assert found[1] == pytest.approx(plain[1], rel=1e-7)
    told = json.loads(echelon_command("plan", "--find-batch", "--json", "--gpus", "2", script, "240", "4800").stdout)
    assert told["accumulate"] == found[0] and told["trials"][0]["fits"] is False


@pytest.mark.full
def test_no_part_of_a_batch_helps_where_the_model_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).replace("nn.Linear(256, 256)", "nn.Linear(256, 300_000)"))
    with refused(PlanError):
        largest_batch(Target(script=str(path), args=("100", "64")), 2)


def test_a_script_without_a_global_batch_is_told_what_says_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).replace("ech.Loader(data, global_batch=rows)", "[(torch.ones(2, 256),)] * 9"))
    with pytest.raises(RankFailedError) as raised:
        largest_batch(Target(script=str(path), args=("0", "64")), 2)
    assert isinstance(raised.value.__cause__, PlanError)


def test_an_error_of_the_script_is_no_lack_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).replace("window.backward(", "window.backwards("))
    with pytest.raises(RankFailedError):
        largest_batch(Target(script=str(path), args=("0", "64")), 2)


def test_it_is_for_this_machine(echelon_command: Command, script: str) -> None:
    assert echelon_command("plan", "--find-batch", "--cluster", "1x8xH100", script).returncode == 2
    assert echelon_command("run", "--find-batch", "-m", "this").returncode == 2
