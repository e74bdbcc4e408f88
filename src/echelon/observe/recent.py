"""The latest time records of all ranks of a running attempt, by which stragglers are judged."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from echelon.contracts.run_dir import RunDir
from echelon.contracts.times import TimeRecord, TimesReader

__all__ = ["KEPT", "Recent"]

KEPT = 32  # per rank, as many as `stragglers` uses


class Recent:
    """Follows the time records of an attempt."""

    def __init__(self, run: RunDir) -> None:
        self._reader = TimesReader(run)
        self._records: dict[int, deque[TimeRecord]] = {}

    def look(self) -> Mapping[int, Sequence[TimeRecord]]:
        """The latest records by rank; empty for a run without records."""
        for rank, new in self._reader.read().items():
            self._records.setdefault(rank, deque(maxlen=KEPT)).extend(new)
        return {rank: list(self._records[rank]) for rank in sorted(self._records)}
