"""What a training leaves to compare, update by update, and the same of plain PyTorch on the global batches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.checkpoint.tensors import Tensors, local_files


@dataclass(frozen=True)
class Curve:
    """Parameters at the end by name, and the loss and the gradient's norm (before clipping) of each update."""

    parameters: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]


class Noting(ech.AutoUnit[Any]):
    """Keeps the norm of each update's gradient, and the batches that it was given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norms: list[float] = []
        self.batches: list[Any] = []

    def train_step(self, state: ech.State, data: Any) -> Any:
        self.batches.append(data)
        return super().train_step(state, data)

    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: ech.units.TrainStepResults) -> None:
        if results.total_grad_norm is not None:
            self.norms.append(float(results.total_grad_norm))


def trained(unit: Noting, loader: Any, folder: Path, updates: int) -> list[float]:
    """Train on this rank, and return the norms; `folder` has the records of losses then, and a checkpoint of the end."""
    (folder / "attempts" / "000").mkdir(parents=True, exist_ok=True)
    os.environ["ECHELON_RUN_DIR"] = str(folder)
    saver = ech.DistributedCheckpointSaver(folder, save_every_n_updates=updates)
    ech.train(unit, loader, max_updates=updates, callbacks=[saver])
    return unit.norms


def plain_curve(
    module: nn.Module,
    batches: Sequence[Any],
    loss_of: Callable[[nn.Module, Any, int], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    clip: float | None,
) -> Curve:
    """One process of plain PyTorch: each batch is one update; `loss_of` is told its number."""
    assert batches
    losses, norms = [], []
    for update, data in enumerate(batches):
        loss = loss_of(module, data, update)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), float("inf") if clip is None else clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Curve({n: p.detach() for n, p in module.named_parameters()}, losses, norms)


def check_curve(curve: Curve, folder: Path, norms: Sequence[float], limit: float, parameters: float, why: str) -> None:
    """That what `trained` left is `curve`: norms to `limit`, losses to the digits of records, parameters to their own limit."""
    if norms:  # without clipping none is computed
        assert list(norms) == pytest.approx(curve.norms, rel=limit), why
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in records if "loss" in r] == pytest.approx(curve.losses, rel=1e-6), why
    with local_files(folder / f"step-{len(curve.losses):08d}") as files:
        saved = Tensors(files)
        far = {n: float((saved.whole(f"module.{n}") - value).abs().max()) for n, value in curve.parameters.items()}
    assert max(far.values()) < parameters, (why, far)
