"""Numbers as people write them: 10, 10.0, or a scalar of numpy or torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from echelon.common.errors import LauncherEnvironmentError, UsageError, require
from echelon.common.terminal import shortly

__all__ = ["count_in", "digits", "number", "plain", "whole"]

_DIGITS = re.compile(r"[0-9]{1,9}")


def whole(name: str, value: Any, *, at_least: int | None = None, or_none: str = "", kind: type[UsageError] = UsageError) -> int:
    """`value` as an int: `len(data) / batch` is a float, and a count may come from an array.

    Args:
        or_none: the meaning of None, for the message.
    Raises:
        UsageError: not a whole number, or too small. True is refused, although Python takes it for 1.
    """
    result = plain(value)
    if isinstance(result, float) and math.isfinite(result) and result == int(result):
        result = int(result)
    least = f" of at least {at_least}" if at_least is not None else ""
    none = f", or None {or_none}" if or_none else ""
    holds = isinstance(result, int) and not isinstance(result, bool) and (at_least is None or result >= at_least)
    require(holds, name, f"a whole number{least}{none}", value, kind=kind)
    return int(result)


def number(
    name: str,
    value: Any,
    what: str,
    holds: Callable[[Any], bool] = lambda result: not math.isnan(result),
    *,
    kind: type[UsageError] = UsageError,
) -> None:
    """Refuse a value that is not a number, or fails `holds`.

    Args:
        holds: a condition on the number; comparisons are false for nan.
    Raises:
        UsageError: not a number, or the condition fails. True is refused.
    """
    result = plain(value)
    require(isinstance(result, Real) and not isinstance(result, bool) and holds(result), name, what, value, kind=kind)


def digits(text: str) -> int | None:
    """The number in at most nine ASCII digits; None for anything else, of which `int` accepts much: "1_0", "٣"."""
    return int(text) if _DIGITS.fullmatch(text) else None


def count_in(env: Mapping[str, str], name: str, otherwise: int | None = None, remedy: str = "") -> int:
    """A variable's number, at least 0.

    Args:
        otherwise: value if the variable is unset or empty; None refuses that.
        remedy: a sentence for the error.
    Raises:
        LauncherEnvironmentError: the variable holds anything else.
    """
    text = env.get(name, "").strip()
    result = otherwise if not text else digits(text)
    if result is None:
        raise LauncherEnvironmentError(f"{name} must be a whole number from 0 on, got {shortly(text)}. {remedy}".rstrip())
    return result


def plain(value: Any) -> Any:
    """A scalar of numpy or torch as Python's own; any other value unchanged."""
    if not isinstance(value, (int, float)) and getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return value.item()
    return value
