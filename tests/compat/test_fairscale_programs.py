"""FairScale programs, run as programs: what they trained is what one plain process trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.programs import fairscale_checkpoint_scaler as with_scaler
from tests.compat.programs import fairscale_sharded_ddp as sharded
from tests.conftest import clean_environment
from tests.kit.models import largest_difference

PROGRAMS = Path(__file__).parent / "programs"


def _run(program: str, out: Path) -> list[Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / f"{program}.py"), "2", str(out)],
        env={**clean_environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.full
def test_oss_and_sharded_ddp_under_spawn(tmp_path: Path) -> None:
    everyones = _run("fairscale_sharded_ddp", tmp_path)
    model = sharded.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(sharded.EPOCHS):
        for data, target in sharded.build_dataloader(0, 1):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(data), target).backward()
            optimizer.step()
    for values, _ in everyones:
        assert largest_difference(values, model.state_dict()) <= 1e-6
    state = everyones[0][1]
    assert state["param_groups"] == optimizer.state_dict()["param_groups"]
    for number, each in optimizer.state_dict()["state"].items():
        assert float((state["state"][number]["momentum_buffer"] - each["momentum_buffer"]).abs().max()) <= 1e-6


@pytest.mark.full
def test_checkpoint_wrapper_and_sharded_grad_scaler(tmp_path: Path) -> None:
    everyones = _run("fairscale_checkpoint_scaler", tmp_path)
    model = with_scaler.CheckpointModel(wrapped=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scale, scales, since = 2.0**10, [], 0
    for step, both in enumerate(zip(with_scaler.batches(0), with_scaler.batches(1), strict=True)):
        optimizer.zero_grad()
        for rank, (data, target) in enumerate(both):  # the same dropout and the same scaling as on the ranks
            torch.manual_seed(100 * step + rank)
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(data)
            (nn.functional.mse_loss(output.float(), target) / 2 * scale).backward()
        if step == 1:
            scale, since = scale / 2, 0
        else:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= scale
            optimizer.step()
            since += 1
            scale, since = (scale * 2, 0) if since == 4 else (scale, since)
        scales.append(scale)
    for values, seen in everyones:
        assert largest_difference(values, model.state_dict()) <= 1e-6
        assert seen == scales
