"""The interface of a logger and its values; and a logger of messages, for code that runs on many ranks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from echelon.common.errors import LauncherEnvironmentError, LoggerError, require
from echelon.contracts.rank import RankInfo

__all__ = ["MetricLogger", "RankLogger", "Scalar", "get_logger", "hold", "rank", "scalar_to_float"]

# An int, a float, or anything with one element and `.item()`: a tensor, a NumPy array or scalar.
Scalar: TypeAlias = Any
Ranks = int | Collection[int] | Literal["all"]


@runtime_checkable
class MetricLogger(Protocol):
    """Takes numbers by name and step. Every rank may call it; the logger decides which ranks write."""

    def log(self, name: str, data: Scalar, step: int) -> None: ...

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None: ...

    def close(self) -> None: ...


def scalar_to_float(scalar: Scalar) -> float:
    """A number of any kind as a float. For a tensor on a GPU this waits for the device.

    Raises:
        UsageError: it holds no number or several.
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
    """The present value, without waiting for a GPU: a value there is copied, and read later."""
    if getattr(scalar, "is_cuda", False):
        return scalar.detach().clone()
    return scalar_to_float(scalar)


def rank() -> int:
    """This process's rank: torch's if it has joined a group, else the launcher's."""
    # Not imported: with a process group, it is loaded already.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    try:
        return RankInfo().rank
    except LauncherEnvironmentError:
        alone = os.environ.get("RANK", "")  # joining ranks reports what is missing; for logging this is enough
        if not alone.isdecimal():
            raise
        return int(alone)


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages only rank 0 writes, unless called with `ranks`: a number, several, or "all".

    With `ranks`, the message begins with the rank. Every record has the attribute `rank`, for formats and filters.
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
    """`logging.getLogger(name)`, whose messages only rank 0 writes.

        log = echelon.loggers.get_logger(__name__)
        log.info("%d samples", n)                      # rank 0
        log.warning("nan in batch %d", i, ranks="all")  # [rank 3] nan in batch 7

    Levels, handlers and formats are Python's: without `logging.basicConfig(level=logging.INFO)` only warnings are shown.
    """
    return RankLogger(logging.getLogger(name), None)
