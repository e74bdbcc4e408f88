"""Numbers as people write them: 10, 10.0, or a scalar of numpy or torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from echelon.contracts.errors import UsageError, require

__all__ = ["number", "plain", "whole"]


def whole(name: str, value: Any, *, at_least: int | None = None, or_none: str = "") -> int:
    """`value` as an int: `len(data) / batch` is a float, and a count may come out of an array.

    Args:
        or_none: what None would mean, for the message.
    Raises:
        UsageError: not a whole number, or too small. True is refused, though Python takes it for 1.
    """
    found = plain(value)
    if isinstance(found, float) and math.isfinite(found) and found == int(found):
        found = int(found)
    if not isinstance(found, int) or isinstance(found, bool) or (at_least is not None and found < at_least):
        least = f" of at least {at_least}" if at_least is not None else ""
        none = f", or None {or_none}" if or_none else ""
        raise UsageError(f"{name} must be a whole number{least}{none}, got {value!r}.")
    return found


def number(name: str, value: Any, what: str, holds: Callable[[Any], bool] = lambda found: not math.isnan(found)) -> None:
    """Refuse what is no number, or not such a one.

    Args:
        holds: what must be true of the number; a comparison is false of nan.
    Raises:
        UsageError: no number, or not such a one. True is refused.
    """
    found = plain(value)
    require(isinstance(found, Real) and not isinstance(found, bool) and holds(found), name, what, value)


def plain(value: Any) -> Any:
    """A scalar of numpy or torch as Python's own; anything else as it is."""
    if not isinstance(value, (int, float)) and getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return value.item()
    return value
