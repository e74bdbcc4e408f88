"""A FairScale program, run as a program: what it trained is what one plain process trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.compat.programs import fairscale_checkpoint_scaler as with_scaler
from tests.conftest import clean_environment
from tests.kit.models import largest_difference

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.full
def test_checkpoint_wrapper_and_sharded_grad_scaler(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "fairscale_checkpoint_scaler.py"), "2", str(tmp_path)],
        env={**clean_environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    everyones = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
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
