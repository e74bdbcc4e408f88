"""Every direction of parallelism, and their products: twenty updates as in one process of plain PyTorch, with prove's engine.

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

import echelon as ech
from echelon.loop.target import Target
from echelon.prover.judge import compare
from echelon.prover.matrix import Row
from echelon.prover.parts import load_records
from echelon.prover.rank import Replay, run_reference, run_row
from tests.kit.language import LENGTH, WORDS, Language, Unit
from tests.kit.standing import StandingRanksBySize

pytestmark = pytest.mark.standing_ranks

UPDATES = 20


def _unit(optimizer: str) -> Unit:
    torch.manual_seed(3)
    module = Language(4)
    module.blocks[0].norm_1.requires_grad_(False)
    module.blocks[2].mlp[2].requires_grad_(False)
    return Unit(optimizer, module)


def _data() -> ech.Loader:
    """42 = 16 + 16 + 10 sequences, which neither two nor four ranks share evenly in the end."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i in range(42):
        words = torch.randint(0, WORDS, (LENGTH + 1,), generator=generator)
        targets = words[1:].clone()
        targets[: i % 5] = -100
        samples.append({"words": words[:-1], "targets": targets})
    return ech.Loader(samples, 16)


def _target(optimizer: str) -> Target:
    return Target(make_unit=functools.partial(_unit, optimizer), make_data=_data)


def _folder(root: str, optimizer: str, name: str) -> Path:
    path = Path(root) / f"{name}-{optimizer}".replace(" ", "-")
    path.mkdir(parents=True, exist_ok=True)
    return path


OPTIMIZERS = ("SGD", "AdamW")


def _run(layout: Any, root: str, name: str) -> None:
    """On each rank, in float64."""
    for optimizer in OPTIMIZERS:
        run_row(_target(optimizer), Row(name, 0, layout, 2), str(_folder(root, optimizer, name)), UPDATES, torch.float64, 0, 5)


def _refer(root: str) -> None:
    for optimizer in OPTIMIZERS:
        data = [str(_folder(root, optimizer, "plain") / "rank0.pt")]
        replay = Replay(_target(optimizer), Row("plain", 1), data, str(_folder(root, optimizer, "reference")), torch.float64, 0)
        run_reference(replay)


@pytest.fixture(scope="module")
def references(standing_ranks: StandingRanksBySize, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """What plain PyTorch gives on the global batches, which are those of any number of ranks."""

    @functools.cache
    def made() -> str:
        root = str(tmp_path_factory.mktemp("directions"))
        standing_ranks(1, _run, "none", root, "plain")
        standing_ranks(1, _refer, root)
        return root

    return made


P = ech.Layout
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
    "pp, gpipe": (2, P(pp=2, schedule="gpipe")),
    "pp, interleaved": (2, P(pp=2, schedule="interleaved")),
    "pp, zero bubble": (2, P(pp=2, schedule="zero_bubble")),
    "pp, zbv": (2, P(pp=2, schedule="zbv")),
    "pp on 4": (4, P(pp=4)),
    "shards x pp": (4, P(dp_shard=2, pp=2)),
    "tp x pp": (4, P(tp=2, pp=2)),
    "tp x pp, sequence parallel, interleaved": (4, P(tp=2, pp=2, sequence_parallel=True, schedule="interleaved")),
    "cp x pp": (4, P(cp=2, pp=2)),
    "copies x shards x tp": (8, "dp_replicate=2,dp_shard=2,tp=2"),
}
FIRST = ("shards x pp",)  # the others are in `make test-all`


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in FIRST else pytest.mark.full) for way in WAYS])
def test_twenty_updates_equal_one_process(standing_ranks: StandingRanksBySize, references: Callable[[], str], way: str) -> None:
    ranks, layout = WAYS[way]
    root = references()
    standing_ranks(ranks, _run, layout, root, way, timeout_s=240)
    for optimizer in OPTIMIZERS:
        mine, right = _folder(root, optimizer, way), _folder(root, optimizer, "reference")
        records = load_records([mine / f"rank{r}.pt" for r in range(ranks)])
        verdict = compare(mine, right, records, torch.float64)
        assert verdict.updates == UPDATES and verdict.first is None, f"{way}, {optimizer}: {verdict}"
        assert max(verdict.loss, verdict.norm, verdict.parameter) < 1e-11, f"{way}, {optimizer}: {verdict}"
