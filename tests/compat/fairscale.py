"""What the tests of FairScale's names share: data by update and rank, and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.compat.fairscale.optim import OSS
from tests.kit.models import Batch, batch


def updates(size: int, dtype: torch.dtype = torch.float64, steps: int = 10) -> list[list[Batch]]:
    return [[batch(4, 10 * i + r, dtype) for r in range(size)] for i in range(steps)]  # by update and rank


def mine(data: Sequence[Sequence[Batch]]) -> list[Batch]:
    return [each[dist.get_rank()] for each in data]


def oss(module: nn.Module, kind: str = "SGD", **options: Any) -> OSS:
    options = {"lr": 0.1, **({"momentum": 0.9} if kind == "SGD" else {}), **options}
    return OSS(module.parameters(), getattr(torch.optim, kind), **options)


def loss(module: nn.Module, data: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(module(data[0]), data[1])


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n.removeprefix("module."): p.detach().clone() for n, p in module.named_parameters()}


def far(a: Any, b: Any) -> float:
    """The largest difference of two optimizer states; anything but numbers must be equal."""
    if isinstance(a, torch.Tensor):
        return float((a.double() - b.double()).abs().max())
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return max((far(a[k], b[k]) for k in a), default=0.0)
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        return max(map(far, a, b), default=0.0)
    assert a == b
    return 0.0
