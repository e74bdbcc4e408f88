"""`lightning.pytorch.utilities`: what programs use of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from echelon.compat.lightning.pytorch.hparams import AttributeDict
from echelon.compat.lightning.pytorch.successors import UTILITIES, missing
from echelon.contracts.rank import RankInfo
from echelon.parallel.shards import whole
from echelon.world.device import copy_data_to_device as move_data_to_device

__all__ = [
    "AttributeDict",
    "grad_norm",
    "move_data_to_device",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


class _RankZeroOnly:
    """A decorator: the function on rank 0; elsewhere it does nothing and gives None."""

    _given: int | None = None

    @property
    def rank(self) -> int:
        """This process's, unless it was told another."""
        return self._given if self._given is not None else RankInfo.from_env().rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._given = rank

    def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return function(*args, **kwargs) if self.rank == 0 else None

        return on_rank_zero


rank_zero_only = _RankZeroOnly()


@rank_zero_only
def rank_zero_info(message: str, *args: Any, **kwargs: Any) -> None:
    logger.info(message)


@rank_zero_only
def rank_zero_warn(message: str, *args: Any, **kwargs: Any) -> None:
    logger.warning(message)


rank_zero_deprecation = rank_zero_warn


def grad_norm(module: torch.nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, float]:
    """Norms of the gradients by parameter, and of all together, under Lightning's names. Collective if they are sharded."""
    kind = float(norm_type)
    named = {n: whole(p.grad).norm(kind) for n, p in module.named_parameters() if p.grad is not None}
    found = {f"grad_{kind}_norm{group_separator}{name}": float(norm) for name, norm in named.items()}
    if named:
        found[f"grad_{kind}_norm_total"] = float(torch.stack(list(named.values())).norm(kind))
    return found


def __getattr__(name: str) -> Any:
    return missing(__name__, name, UTILITIES)
