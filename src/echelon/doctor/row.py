"""A line of the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Row", "State"]

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        state: "ok", "warn" for what costs speed or may fail later, "fail" for what must be mended.
        said: what was found.
        remedy: what to do; empty if it is well.
    """

    name: str
    state: State
    said: str
    remedy: str = ""
