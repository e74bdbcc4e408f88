"""Every layout trains as one process in plain PyTorch does: twenty updates on 2 and 4 ranks.

A layout that is added to LAYOUTS is tested here by existing. All cases of a layout share one start of its ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.parallel import LAYOUTS
from tests.kit.curves import Curve, Noting, check_curve, plain_curve, trained
from tests.kit.models import Net
from tests.kit.standing import StandingRanksBySize

pytestmark = pytest.mark.standing_ranks

UPDATES, OF_ONE_SHAPE = 20, 10


@dataclass(frozen=True)
class Case:
    """One way of training. The shape "everything" has all that the gradient of a window may meet, the others a part each."""

    optimizer: str
    shape: str
    dtype: str = "float64"

    def folder(self, root: str | Path) -> Path:
        return Path(root) / f"{self.optimizer}-{self.shape}-{self.dtype}"

    @property
    def accumulation(self) -> int:
        return {"tail": 1, "everything": 2, "frozen": 2, "unused": 4}[self.shape]

    @property
    def rows(self) -> int:
        # 42 = 16 + 16 + 10, which neither two nor four ranks share evenly.
        return 42 if self.shape in ("tail", "everything") else 48

    @property
    def has_frozen_layers(self) -> bool:
        return self.shape in ("frozen", "everything")

    @property
    def has_unused_layers(self) -> bool:
        return self.shape in ("unused", "everything")

    @property
    def clip(self) -> float | None:
        return None if self.shape == "frozen" else 0.5

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32


CASES = [Case("SGD", "everything"), Case("AdamW", "tail"), Case("SGD", "tail", "float32")]
FURTHER = [Case("SGD", "unused"), Case("Adam", "frozen"), Case("AdamW", "unused", "float32")]


class Sometimes(Net):
    """A net whose second block takes part only if it is told to."""

    whole = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks if self.whole else self.blocks[:1]:
            x = x + block(x)
        return self.last(x)


def _loss(module: nn.Module, data: Any) -> torch.Tensor:
    x, y, mask = data
    error = (module(x) - y).square() * mask
    return error.sum() / mask.sum().clamp(min=1)


class Tokens(Noting):
    """Least squares over the rows that a mask leaves, weighed by them, clipped."""

    def __init__(self, case: Case, module: nn.Module, layout: Any) -> None:
        super().__init__(module=module, layout=layout, clip_grad_norm=case.clip)
        self.case, self.updates = case, 0

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        self.prepared.unwrapped.whole = self.updates % 2 == 0
        return _loss(self.module, data), None

    def weight(self, data: Any) -> torch.Tensor:
        return data[2].sum()

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        kind = getattr(torch.optim, self.case.optimizer)
        options = {"momentum": 0.9} if self.case.optimizer == "SGD" else {}
        optimizer = kind(module.parameters(), lr=0.02, **options)
        self.updates = 0
        optimizer.register_step_post_hook(self._count)
        return optimizer, None

    def _count(self, *_: Any) -> None:
        self.updates += 1


def _module(case: Case) -> Net:
    torch.manual_seed(3)
    module = Sometimes() if case.has_unused_layers else Net()
    if case.has_frozen_layers:
        module.blocks[0].requires_grad_(False)
    return module.to(case.torch_dtype)


def _data(case: Case, accumulation: int) -> ech.Loader:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i in range(case.rows):
        x, y = torch.randn(4, generator=generator), torch.randn(1, generator=generator)
        samples.append(tuple(each.to(case.torch_dtype) for each in (x, y, torch.tensor([float(i % 3 > 0)]))))
    return ech.Loader(samples, 16, accumulate=accumulation)


def _tolerant(layout: Any, case: Case) -> Any:
    """DistributedDataParallel must be told that parameters may stay unused; FSDP need not."""
    if case.has_unused_layers and layout == "ddp":
        return ech.DDPStrategy(find_unused_parameters=True)
    if case.has_unused_layers and layout == "zero1":
        return ech.DDPStrategy(find_unused_parameters=True, shard_optimizer=True)
    return layout


def _run_all(layout: Any, cases: Sequence[Case], root: str, updates: int) -> list[list[float]]:
    """On each rank: all cases, one after the other; the norms of each."""
    norms = []
    for case in cases:
        unit = Tokens(case, _module(case), _tolerant(layout, case))
        norms.append(trained(unit, _data(case, case.accumulation), case.folder(root), updates))
    return norms


def _plain(cases: Sequence[Case], updates: int) -> list[Curve]:
    """On the global batches, which are those of any number of ranks."""
    curves = []
    for case in cases:
        unit, module = Tokens(case, _module(case), "none"), _module(case)
        ech.train(unit, _data(case, 1), max_updates=updates)
        optimizer, _ = unit.configure_optimizers_and_lr_scheduler(module)

        def loss_of(module: nn.Module, data: Any, update: int) -> torch.Tensor:
            module.whole = update % 2 == 0
            return _loss(module, data)

        curves.append(plain_curve(module, unit.batches, loss_of, optimizer, case.clip))
    return curves


WAYS: dict[str, tuple[int, Any]] = {
    f"{name} on {ranks}": (ranks, name)
    for name in (*LAYOUTS, "tp")
    for ranks in (2, 4)
    # One process; workers that meet seldom; two ranks cannot be split in two ways.
    if name not in ("none", "local_sgd", "diloco") and (name, ranks) != ("hsdp", 2)
}
WAYS["tp x fsdp on 4"] = (4, ech.Layout(tp=2))
WAYS["tp x hsdp on 4"] = (4, ech.Layout(tp=1, dp_replicate=2))


# In `make test` each layout is on two ranks, and hsdp, which divides ranks in two ways, on four.
MORE = tuple(way for way, (ranks, _) in WAYS.items() if ranks == 4 and way != "hsdp on 4")


Plain = Callable[[tuple[Case, ...], int], list[Curve]]


@pytest.fixture(scope="module")
def plain(standing_ranks: StandingRanksBySize) -> Plain:
    return functools.cache(lambda cases, updates: standing_ranks(1, _plain, cases, updates)[0])


def _check(standing_ranks: StandingRanksBySize, plain: Plain, root: Path, way: str, cases: list[Case], updates: int) -> None:
    """Within 1e-11 in float64; in float32 1e-6, parameters of Adam 1e-4, since it makes rounding as large as any gradient."""
    ranks, layout = WAYS[way]
    for norms in standing_ranks(ranks, _run_all, layout, cases, str(root), updates, timeout_s=120):
        for case, mine, curve in zip(cases, norms, plain(tuple(cases), updates), strict=True):
            assert (not mine) == (case.clip is None)
            limit = 1e-11 if case.dtype == "float64" else 1e-6
            of_parameters = limit if case.dtype == "float64" or case.optimizer == "SGD" else 1e-4
            check_curve(curve, case.folder(root), mine, limit, of_parameters, f"{way}, {case}")


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.full if way in MORE else ()) for way in WAYS])
def test_twenty_updates_equal_one_process(standing_ranks: StandingRanksBySize, plain: Plain, tmp_path: Path, way: str) -> None:
    _check(standing_ranks, plain, tmp_path, way, CASES, UPDATES)


@pytest.mark.full
@pytest.mark.parametrize("way", [way for way, (ranks, _) in WAYS.items() if ranks == 2])
def test_updates_of_one_shape_at_a_time_equal_one_process(
    standing_ranks: StandingRanksBySize, plain: Plain, tmp_path: Path, way: str
) -> None:
    _check(standing_ranks, plain, tmp_path, way, FURTHER, OF_ONE_SHAPE)
