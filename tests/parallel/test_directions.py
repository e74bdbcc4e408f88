"""Every direction of parallelism, and their products: six updates as in one process of plain PyTorch.

A small language model with all that the gradient of a window may meet: token weights, a short tail, uneven shares, clipping,
accumulation, frozen layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech
from tests.kit.curves import Curve, Noting, check_curve, plain_curve, trained
from tests.kit.language import LENGTH, WORDS, Language, Unit
from tests.kit.standing import StandingRanksBySize

pytestmark = pytest.mark.standing_ranks

UPDATES = 6  # two epochs, both of which end with a short batch


def _model() -> Language:
    torch.manual_seed(3)
    module = Language(4).double()
    module.blocks[0].norm_1.requires_grad_(False)
    module.blocks[2].mlp[2].requires_grad_(False)
    return module


def _data(accumulation: int) -> ech.Loader:
    """42 = 16 + 16 + 10 sequences, which neither two nor four ranks share evenly in the end."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i in range(42):
        words = torch.randint(0, WORDS, (LENGTH + 1,), generator=generator)
        targets = words[1:].clone()
        targets[: i % 5] = -100
        samples.append({"words": words[:-1], "targets": targets})
    return ech.Loader(samples, 16, accumulate=accumulation)


class _Unit(Noting, Unit):
    """Keeps what is compared."""


def _run(layout: Any, kind: str, folder: Path) -> list[float]:
    """On each rank: the norms of all updates."""
    return trained(_Unit(optimizer=kind, module=_model(), layout=layout), _data(2), folder, UPDATES)


def _loss(module: nn.Module, data: Any, update: int) -> torch.Tensor:
    return F.cross_entropy(module(data["words"]).flatten(0, 1), data["targets"].flatten(), ignore_index=-100)


def _plain() -> dict[str, Curve]:
    """By optimizer, on the global batches, which are those of any number of ranks."""
    unit, curves = _Unit(optimizer="SGD", module=_model(), layout="none"), {}
    ech.train(unit, _data(1), max_updates=UPDATES)
    for kind in ("SGD", "AdamW"):
        module = _model()
        unit.kind = kind
        optimizer, _ = unit.configure_optimizers_and_lr_scheduler(module)
        curves[kind] = plain_curve(module, unit.batches, _loss, optimizer, 0.3)
    return curves


@pytest.fixture(scope="module")
def plain(standing_ranks: StandingRanksBySize) -> Callable[[], dict[str, Curve]]:
    return functools.cache(lambda: standing_ranks(1, _plain)[0])


P = ech.Layout
# The schedules of two stages alone are test_pipeline.py's.
WAYS: dict[str, tuple[int, Any]] = {
    "tp on 4": (4, "tp=4"),
    "copies x shards": (4, "dp_replicate=2,dp_shard=2"),
    "shards x tp": (4, "dp_shard=2,tp=2"),
    "cp": (2, "cp=2"),
    "cp on 4": (4, "cp=4"),
    "shards x cp": (4, "dp_shard=2,cp=2"),
    "copies x cp": (4, "dp_replicate=2,dp_shard=1,cp=2"),
    "cp x tp": (4, "cp=2,tp=2"),
    "tp, sequence parallel": (2, P(tp=2, sequence_parallel=True)),
    "pp": (2, P(pp=2)),
    "pp on 4": (4, P(pp=4)),
    "shards x pp": (4, P(dp_shard=2, pp=2)),
    "tp x pp": (4, P(tp=2, pp=2)),
    "tp x pp, sequence parallel, interleaved": (4, P(tp=2, pp=2, sequence_parallel=True, schedule="interleaved")),
    "cp x pp": (4, P(cp=2, pp=2)),
    "copies x shards x tp": (8, "dp_replicate=2,dp_shard=2,tp=2"),
}
FIRST = ("shards x pp",)  # the others are in `make test-all`


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in FIRST else pytest.mark.full) for way in WAYS])
def test_six_updates_equal_one_process(
    standing_ranks: StandingRanksBySize, plain: Callable[[], dict[str, Curve]], tmp_path: Path, way: str
) -> None:
    """With SGD, which hides no gradient of a wrong size; each third way with AdamW, whose state is divided, too."""
    ranks, layout = WAYS[way]
    kind = "AdamW" if list(WAYS).index(way) % 3 == 1 else "SGD"
    for norms in standing_ranks(ranks, _run, layout, kind, tmp_path, timeout_s=240):
        check_curve(plain()[kind], tmp_path, norms, 1e-11, 1e-11, f"{way}, {kind}")
