"""Every layout trains as one process in plain PyTorch does: twenty updates on 2 and 4 ranks.

A layout that is added to LAYOUTS is tested here by existing. All cases of a layout share one start of its ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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

UPDATES = 20


@dataclass(frozen=True)
class Case:
    """One way of training. The shape "everything" has all that the gradient of a window may meet; "tail" has a short last batch,
    and weights that two blocks, which are split one by one, have in common.
    """

    optimizer: str
    shape: str
    dtype: str = "float64"

    def folder(self, root: str | Path) -> Path:
        return Path(root) / f"{self.optimizer}-{self.shape}-{self.dtype}"

    @property
    def accumulation(self) -> int:
        return 2 if self.has_everything else 1

    @property
    def has_everything(self) -> bool:
        return self.shape == "everything"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32


CASES = (Case("SGD", "everything"), Case("AdamW", "tail"), Case("SGD", "tail", "float32"))
ROWS = 42  # 16 + 16 + 10, which neither two nor four ranks share evenly
CLIP = 0.5


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
        super().__init__(module=module, layout=layout, clip_grad_norm=CLIP)
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
    module = Sometimes() if case.has_everything else Net()
    if case.has_everything:
        module.blocks[0].requires_grad_(False)
    else:
        module.blocks[1][0].weight = module.blocks[0][0].weight
    return module.to(case.torch_dtype)


def _data(case: Case, accumulation: int) -> ech.Loader:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i in range(ROWS):
        x, y = torch.randn(4, generator=generator), torch.randn(1, generator=generator)
        samples.append(tuple(each.to(case.torch_dtype) for each in (x, y, torch.tensor([float(i % 3 > 0)]))))
    return ech.Loader(samples, 16, accumulate=accumulation)


def _tolerant(layout: Any, case: Case) -> Any:
    """DistributedDataParallel must be told that parameters may stay unused; FSDP need not."""
    if case.has_everything and layout in ("ddp", "zero1"):
        return ech.DDPStrategy(find_unused_parameters=True, shard_optimizer=layout == "zero1")
    return layout


def _run_all(layout: Any, root: str) -> list[list[float]]:
    """On each rank: all cases, one after the other; the norms of each."""
    norms = []
    for case in CASES:
        unit = Tokens(case, _module(case), _tolerant(layout, case))
        norms.append(trained(unit, _data(case, case.accumulation), case.folder(root), UPDATES))
    return norms


def _plain() -> list[Curve]:
    """On the global batches, which are those of any number of ranks."""
    curves = []
    for case in CASES:
        unit, module = Tokens(case, _module(case), "none"), _module(case)
        ech.train(unit, _data(case, 1), max_updates=UPDATES)
        optimizer, _ = unit.configure_optimizers_and_lr_scheduler(module)

        def loss_of(module: nn.Module, data: Any, update: int) -> torch.Tensor:
            module.whole = update % 2 == 0
            return _loss(module, data)

        curves.append(plain_curve(module, unit.batches, loss_of, optimizer, CLIP))
    return curves


WAYS: dict[str, tuple[int, Any]] = {
    f"{name} on {ranks}": (ranks, name)
    for name in (*LAYOUTS, "tp")
    # Two ranks cannot be split in two ways; test_directions.py has the products.
    for ranks in ((4,) if name == "hsdp" else (2, 4) if name in ("fsdp", "zero1") else (2,))
    # One process; workers that meet seldom.
    if name not in ("none", "local_sgd", "diloco")
}


# In `make test` each layout is on two ranks, and hsdp, which divides ranks in two ways, on four.
MORE = ("fsdp on 4", "zero1 on 4")


@pytest.fixture(scope="module")
def plain(standing_ranks: StandingRanksBySize) -> Callable[[], list[Curve]]:
    return functools.cache(lambda: standing_ranks(1, _plain)[0])


@pytest.mark.full(but=("ddp on 2", "zero1 on 2", "fsdp on 2"))
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.full if way in MORE else ()) for way in WAYS])
def test_twenty_updates_equal_one_process(
    standing_ranks: StandingRanksBySize, plain: Callable[[], list[Curve]], tmp_path: Path, way: str
) -> None:
    """Within 1e-11 in float64, in float32 1e-6."""
    ranks, layout = WAYS[way]
    for norms in standing_ranks(ranks, _run_all, layout, str(tmp_path), timeout_s=120):
        for case, mine, curve in zip(CASES, norms, plain(), strict=True):
            assert mine
            limit = 1e-11 if case.dtype == "float64" else 1e-6
            check_curve(curve, case.folder(tmp_path), mine, limit, limit, f"{way}, {case}")
