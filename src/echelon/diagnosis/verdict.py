"""The conclusion of a rule."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UNKNOWN", "Verdict"]

# Causes without a guilty rank; the first two are no failures.
FINE, RUNNING, UNKNOWN = "fine", "running", "unknown"


@dataclass(frozen=True)
class Verdict:
    """Why an attempt ended.

    Args:
        guilty: the ranks that caused the end; none if no rank is to blame, or nothing tells which.
        cause: one or two words, such as "exception", "mismatch", "stopped", "out of memory" or "unknown".
        headline: a line for the top of a report, such as "rank 2 raised ValueError at train.py:41".
        paragraph: all of it in a few sentences, with the remedy.
        seen: further observations, one per line.
    """

    guilty: tuple[int, ...]
    cause: str
    headline: str
    paragraph: str
    seen: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        return self.cause != UNKNOWN
