"""The latest records of where the ranks' time goes: what stragglers are judged by, of a run that is under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from echelon.contracts.run_dir import RunDir
from echelon.contracts.times import TimeRecord, TimesReader

__all__ = ["KEPT", "Recent"]

KEPT = 32  # of each rank: as many as `stragglers` looks at


class Recent:
    """Follows the times of an attempt."""

    def __init__(self, run: RunDir) -> None:
        self._reader = TimesReader(run)
        self._records: dict[int, deque[TimeRecord]] = {}

    def look(self) -> Mapping[int, Sequence[TimeRecord]]:
        """The latest records by rank; empty for a run that leaves none."""
        for rank, new in self._reader.read().items():
            self._records.setdefault(rank, deque(maxlen=KEPT)).extend(new)
        return {rank: list(self._records[rank]) for rank in sorted(self._records)}
