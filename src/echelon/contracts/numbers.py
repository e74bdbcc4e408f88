"""Whole numbers as people write them: 10, 10.0, or a scalar of numpy or torch."""

from __future__ import annotations

import math
from typing import Any

from echelon.contracts.errors import UsageError

__all__ = ["whole"]


def whole(name: str, value: Any, *, at_least: int, or_none: str = "") -> int:
    """`value` as an int: `len(data) / batch` is a float, and a count may come out of an array.

    Args:
        or_none: what None would mean, for the message.
    Raises:
        UsageError: not a whole number, or too small. True is refused, though Python takes it for 1.
    """
    plain = value
    if not isinstance(value, (int, float)) and getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        plain = value.item()  # of numpy or torch
    if isinstance(plain, float) and math.isfinite(plain) and plain == int(plain):
        plain = int(plain)
    if not isinstance(plain, int) or isinstance(plain, bool) or plain < at_least:
        none = f", or None {or_none}" if or_none else ""
        raise UsageError(f"{name} must be a whole number of at least {at_least}{none}, got {value!r}.")
    return plain
