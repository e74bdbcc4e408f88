"""What a rule concludes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UNKNOWN", "Verdict"]

# Of which nobody can be accused; the first two are no failures.
FINE, RUNNING, UNKNOWN = "fine", "running", "unknown"


@dataclass(frozen=True)
class Verdict:
    """Why an attempt ended.

    Args:
        guilty: the ranks from which the rest follows; none if nobody is to blame, or nothing tells who.
        cause: one word or two for it, such as "exception", "mismatch", "stopped", "out of memory" or "unknown".
        headline: a line for the top of a report, such as "rank 2 raised ValueError at train.py:41".
        paragraph: the whole in a few sentences, with what to do about it.
        seen: what else was seen, a line each.
    """

    guilty: tuple[int, ...]
    cause: str
    headline: str
    paragraph: str
    seen: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        return self.cause != UNKNOWN
