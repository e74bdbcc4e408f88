"""Older limits, which counted micro-batches, where those of today count updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from echelon.common.errors import LoopError

__all__ = ["accumulation_of", "refuse_steps"]


def accumulation_of(unit: Any, loader: Any) -> int:
    """The micro-batches of an update, on which unit and loader agree here if they have not yet."""
    settle = getattr(unit, "settle_accumulation", None)
    if settle is not None:
        return int(settle(loader))
    found = getattr(loader, "accumulation", None) or getattr(unit, "gradient_accumulation_steps", None)
    return found if isinstance(found, int) else 1


def refuse_steps(of: str, older: Mapping[str, Any], words: Mapping[str, str], size: int) -> None:
    """
    Args:
        of: whose arguments.
        older: what counted micro-batches, by its older name; `words` has today's.
        size: micro-batches of an update.
    Raises:
        UsageError: it would count something else now; with the number of updates to write.
    """
    for name, value in older.items():
        if size > 1 and isinstance(value, (int, float)) and math.isfinite(value):
            raise LoopError(
                f"{of}({name}={value:g}) counted micro-batches, of which an update has {size} here. It is now {words[name]}, "
                f"which counts updates: write {words[name]}={math.ceil(value / size)}."
            )
