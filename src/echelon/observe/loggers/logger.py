"""What a logger promises, and what may be given to one; and Python's own logging, where many ranks run the same line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from echelon.common.errors import LauncherEnvironmentError, LoggerError, require
from echelon.contracts.rank import RankInfo

__all__ = ["MetricLogger", "RankLogger", "Scalar", "get_logger", "hold", "rank", "scalar_to_float"]

# An int, a float, or anything with one element and `.item()`: a tensor, a NumPy array or number.
Scalar: TypeAlias = Any
Ranks = int | Collection[int] | Literal["all"]


@runtime_checkable
class MetricLogger(Protocol):
    """Takes numbers by name and step. Every rank may call it; which ranks write is the logger's own business."""

    def log(self, name: str, data: Scalar, step: int) -> None: ...

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None: ...

    def close(self) -> None: ...


def scalar_to_float(scalar: Scalar) -> float:
    """A number of any kind as a float. Of a tensor on a GPU this waits for the device.

    Raises:
        UsageError: it holds none or several numbers.
    """
    if isinstance(scalar, (int, float)):
        return float(scalar)
    count = scalar.numel() if hasattr(scalar, "numel") else getattr(scalar, "size", 1)
    if count != 1:
        raise LoggerError(
            f"a logged value must be a single number, got a {type(scalar).__name__} of {count}. Log its mean or sum."
        )
    return float(scalar.item() if hasattr(scalar, "item") else scalar)


def hold(scalar: Scalar) -> Scalar:
    """The number as it is now, without waiting for a GPU: what lives there stays there, as a copy, until it is read."""
    if getattr(scalar, "is_cuda", False):
        return scalar.detach().clone()
    return scalar_to_float(scalar)


def rank() -> int:
    """This process's rank: torch's if it has joined a group, else the launcher's."""
    # Not imported: where there is a process group, it has been loaded.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    try:
        return RankInfo().rank
    except LauncherEnvironmentError:
        alone = os.environ.get("RANK", "")  # whoever joins ranks says what is missing; to watch, this is enough
        if not alone.isdecimal():
            raise
        return int(alone)


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages rank 0 alone writes, unless they are given `ranks`: a number, several, or "all".

    A message of other ranks than 0 begins with its rank. Every record has the attribute `rank`, for formats and filters.
    """

    def log(self, level: int, msg: object, *args: object, ranks: Ranks = 0, **kwargs: Any) -> None:  # type: ignore[override]
        if not self.isEnabledFor(level):
            return
        this_rank = rank()
        if not _says(ranks, this_rank):
            return
        if ranks != 0:
            msg = f"[rank {this_rank}] {msg}"
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "rank": this_rank}
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line, not this one
        super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs


def _says(ranks: Ranks, this_rank: int) -> bool:
    if isinstance(ranks, str):
        require(ranks == "all", "ranks", "a rank, several, or 'all'", ranks, kind=LoggerError)
        return True
    return this_rank == ranks if isinstance(ranks, int) else this_rank in ranks


def get_logger(name: str | None = None) -> RankLogger:
    """`logging.getLogger(name)`, of which rank 0 alone writes.

        log = echelon.loggers.get_logger(__name__)
        log.info("%d samples", n)                      # rank 0
        log.warning("nan in batch %d", i, ranks="all")  # [rank 3] nan in batch 7

    Levels, handlers and formats are Python's: without `logging.basicConfig(level=logging.INFO)` only warnings are shown.
    """
    return RankLogger(logging.getLogger(name), None)
