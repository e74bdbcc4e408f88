"""torchtnt.utils.loggers.utils."""

from __future__ import annotations

from echelon.common.errors import UsageError
from echelon.observe.loggers import logger
from echelon.observe.loggers.logger import Scalar

__all__ = ["scalar_to_float"]


def scalar_to_float(scalar: Scalar) -> float:
    """A number, or what holds a single one, as a float.

    Raises:
        UsageError, a ValueError: it holds more, or none.
    """
    kind, given = ("tensor", scalar.numel()) if hasattr(scalar, "numel") else ("ndarray", getattr(scalar, "size", 1))
    if given != 1:
        raise UsageError(f"Scalar {kind} must contain a single item, {given} given.")
    return logger.scalar_to_float(scalar)
