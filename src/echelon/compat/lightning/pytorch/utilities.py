"""`lightning.pytorch.utilities`: the names that programs use."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar

import torch

from echelon.common.errors import UsageError as MisconfigurationException
from echelon.compat.lightning.pytorch.hooks import overridden
from echelon.compat.lightning.pytorch.hparams import AttributeDict
from echelon.compat.lightning.pytorch.optimizers import Schedule
from echelon.contracts.rank import RankInfo
from echelon.parallel.shards import whole
from echelon.world import rng
from echelon.world.device import copy_data_to_device as move_data_to_device

__all__ = [
    "EVAL_DATALOADERS",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
    "AttributeDict",
    "GradClipAlgorithmType",
    "LRSchedulerConfig",
    "LRSchedulerConfigType",
    "LRSchedulerTypeUnion",
    "LightningDeprecationWarning",
    "LightningEnum",
    "MisconfigurationException",
    "OptimizerConfig",
    "OptimizerLRScheduler",
    "OptimizerLRSchedulerConfig",
    "PossibleUserWarning",
    "garbage_collection_cuda",
    "grad_norm",
    "is_oom_error",
    "is_overridden",
    "isolate_rng",
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
    """A decorator: the function runs on rank 0; on other ranks it does nothing and returns None."""

    _given: int | None = None

    @property
    def rank(self) -> int:
        """This process's rank, unless another was set."""
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
    norms = {f"grad_{kind}_norm{group_separator}{name}": float(norm) for name, norm in named.items()}
    if named:
        norms[f"grad_{kind}_norm_total"] = float(torch.stack(list(named.values())).norm(kind))
    return norms


class PossibleUserWarning(UserWarning):
    """For scripts that filter it; no warning here has this class."""


class LightningDeprecationWarning(DeprecationWarning):
    """Likewise."""


class LightningEnum(StrEnum):
    @classmethod
    def from_str(cls, value: str) -> LightningEnum | None:
        """The member of this value or name, in any case; None if there is none."""
        return next((each for each in cls if value.lower() in (each.value.lower(), each.name.lower())), None)


class GradClipAlgorithmType(LightningEnum):
    VALUE = "value"
    NORM = "norm"


def is_overridden(method_name: str, instance: object, parent: type | None = None) -> bool:
    """Whether an object has a method of its own in place of its Lightning base's, or of `parent`'s."""
    if parent is None:
        bases = [base for base in type(instance).__mro__ if base.__module__.startswith("echelon.compat.lightning")]
        parent = next((base for base in bases if hasattr(base, method_name)), None)
        if parent is None:
            raise ValueError(f"{type(instance).__name__} has no base of Lightning's with {method_name!r}.")
    return overridden(method_name, instance, parent)


def is_oom_error(exception: BaseException) -> bool:
    return isinstance(exception, torch.OutOfMemoryError) or "out of memory" in str(exception)


def garbage_collection_cuda() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def isolate_rng(include_cuda: bool = True) -> AbstractContextManager[None]:
    """Context after which the RNG states of Python, numpy and torch are what they were before."""
    return rng.unchanged()


# For annotations.
STEP_OUTPUT = EVAL_DATALOADERS = TRAIN_DATALOADERS = OptimizerLRScheduler = LRSchedulerTypeUnion = Any
OptimizerConfig = OptimizerLRSchedulerConfig = LRSchedulerConfigType = dict[str, Any]
LRSchedulerConfig = Schedule
