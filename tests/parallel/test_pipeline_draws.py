"""Random numbers in a pipeline: those of the loss and of the author's forward are alike in all stages, each layer's its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import seeded, whole
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

WIDTH = 6


class Block(nn.Module):
    """Drops, and keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drawn = nn.Linear(WIDTH, WIDTH), list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand_like(x)
        if self.training and torch.is_grad_enabled():
            self.drawn.append(float(mask.sum()))
        return x + self.linear(x).tanh() * (mask > 0.3)


class Model(nn.Module):
    """Draws between its blocks, too, and can compute them again."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.blocks, self.drop, self.again = nn.ModuleList(Block() for _ in range(4)), nn.Dropout(0.2), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.drop(checkpoint(block, x, use_reentrant=False) if self.again else block(x))
        return x


class Denoiser(Regression):
    """Noise of all three kinds, of which the first stage sees the one half and the last the other."""

    def __init__(self, again: bool = False, **options: Any) -> None:
        super().__init__(module=seeded(Model, again=again), accumulate=2, lr=0.05, **options)
        self.noise = list[float]()

    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        noise = torch.randn_like(data) * random.random() + float(np.random.rand())
        if not self.prepared.batches.dry_run:
            self.noise.append(float(noise.sum()))
        return (self.module(data + noise) - noise).square().mean(), None

    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: ech.units.TrainStepResults) -> None:
        if dist.get_rank() == 0:  # one rank draws for itself, as for a picture
            torch.randn(3), random.random(), np.random.rand()
        torch.manual_seed(step + dist.get_rank())  # as some scripts do for their augmentation


def _batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5)))


def _drawn(layout: Any, again: bool = False) -> tuple[list[float], list[float], list[float], dict[str, torch.Tensor]]:
    unit = Denoiser(again, layout=layout)
    ech.train(unit, _batches(6), max_epochs=1)
    trained, unit.noise = unit.noise, []
    ech.evaluate(unit, _batches(2))
    blocks = [block for block in unit.prepared.unwrapped.blocks if next(block.parameters(recurse=True), None) is not None]
    return trained, unit.noise, [each for block in blocks for each in block.drawn[-6:]], whole(unit.module)


@pytest.mark.full
@pytest.mark.parametrize("layout", [ech.Layout(pp=2), ech.Layout(pp=2, schedule="interleaved"), "pp=2,dp_shard=2"])
def test_noise_is_alike_in_all_stages_and_layers_draw_apart(ranks: Ranks, layout: Any) -> None:
    told = ranks(2 if isinstance(layout, ech.Layout) else 4, _drawn, layout)
    here, there = told[0], told[len(told) // 2 if len(told) == 4 else 1]
    assert here[:2] == there[:2]
    stages = 2 if isinstance(layout, ech.Layout) and layout.schedule == "interleaved" else 1
    assert len(set(here[0])) == len(here[0]) / stages == 6 and len(set(here[1])) == 2
    layers = [each for rank in told for each in rank[2]]
    assert len(set(layers)) == len(layers) == 24 * len(told) / 2
    if len(told) == 4:
        assert not set(told[0][0]) & set(told[1][0])


@pytest.mark.full
def test_what_is_computed_again_draws_the_same_again(ranks: Ranks) -> None:
    once, twice = (ranks(2, _drawn, ech.Layout(pp=2), again) for again in (False, True))
    for plain, again in zip(once, twice, strict=True):
        assert all(torch.equal(plain[3][name], again[3][name]) for name in plain[3])
