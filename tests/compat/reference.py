"""What the programs of this folder have to train: one process, and nothing but PyTorch."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.diagnosis import Evidence, explain
from tests.compat.programs import dragon_training
from tests.conftest import clean_environment
from tests.kit.models import Batch, largest_difference

__all__ = ["check_dragon_training", "in_order", "plain", "run_programs"]


def plain(
    module: nn.Module,
    batches: Iterable[Batch],
    *,
    epochs: int,
    momentum: float = 0.9,
    gamma: float = 1.0,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.mse_loss,
    clip: float = float("inf"),
) -> dict[str, torch.Tensor]:
    """Parameters after training; the rate of 0.1 is multiplied by `gamma` after each epoch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)
    batches = list(batches)
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss(module(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
        optimizer.param_groups[0]["lr"] *= gamma
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def in_order(data: Any, size: int) -> list[Batch]:
    """The global batches of a program whose sampler does not shuffle."""
    rows, targets = data.tensors
    return [(rows[i : i + size], targets[i : i + size]) for i in range(0, len(rows), size)]


def check_dragon_training(said: str, shown: Iterable[int]) -> None:
    """What programs/dragon_training.py printed: its all-reduce, on the ranks whose output is shown, and what all have trained."""
    [line] = [line for line in said.splitlines() if line.startswith("the ranks returned ")]
    values = json.loads(line.removeprefix("the ranks returned "))
    ranks = len(values)
    assert ranks >= 2 and [total for total, _ in values] == [sum(range(ranks))] * ranks
    for rank in shown:
        assert f"Rank {rank}: Tensor after all_reduce = {values[rank][0]}" in said
    batches = in_order(dragon_training.dataset(), dragon_training.GLOBAL_BATCH)
    want = plain(dragon_training.build_model(), batches, epochs=dragon_training.EPOCHS)
    for rank, (_, parameters) in enumerate(values):
        got = {name: torch.tensor(value, dtype=torch.float64) for name, value in parameters.items()}
        assert largest_difference(got, want) < 1e-12, rank


def _stuck(folder: Path, started: Sequence[subprocess.Popen[str]]) -> str:
    """What programs that do not end have printed, and where their ranks stand: a launcher that is asked to end gathers that."""
    texts = []
    for process in started:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            texts.append(process.communicate(timeout=180)[0])
    for run in sorted((folder / "runs").glob("*")):
        verdict = explain(Evidence.of(run, 0))
        texts += [run.name, verdict.paragraph, *verdict.seen]
        texts += [path.read_text() for path in sorted((run / "dumps").rglob("stack.*"))]
    return "\n".join(texts)


def run_programs(folder: Path, *commands: tuple[str, ...]) -> list[str]:
    """What programs printed, which ran side by side."""
    options: dict[str, Any] = {"cwd": folder, "env": {**clean_environment(), "OMP_NUM_THREADS": "1"}, "text": True}
    options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = [subprocess.Popen([sys.executable, *command], **options) for command in commands]
    try:
        said = [process.communicate(timeout=150)[0] for process in started]
    except subprocess.TimeoutExpired:
        pytest.fail(f"programs have not ended within 150 s:\n{_stuck(folder, started)}")
    finally:
        for process in started:
            process.kill()
            process.communicate()
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0, text
    return said
