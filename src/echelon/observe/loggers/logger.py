"""What a logger promises, and what may be given to one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from echelon.common.errors import LauncherEnvironmentError, LoggerError
from echelon.contracts.rank import RankInfo

__all__ = ["MetricLogger", "Scalar", "hold", "rank", "scalar_to_float"]

# An int, a float, or anything with one element and `.item()`: a tensor, a NumPy array or number.
Scalar: TypeAlias = Any


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
