"""A summary of all ranks' times in an attempt, read rank by rank: a day of a thousand ranks is six million records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.contracts.run_dir import RunDir
from echelon.contracts.times import TimeRecord, ranks_of, records_of

__all__ = ["AttemptTimes", "times_of"]


@dataclass(frozen=True)
class AttemptTimes:
    """The times of an attempt. Holds the records of one rank only.

    Args:
        critical: records of the rank that came furthest; among equals, of the one that waited least, for whose data all waited.
        ranks: ranks with records, in order.
        steps: lowest and highest step of any rank; None without records.
        began: lowest step at which a rank began that completed a step; None if none did.
    """

    run: RunDir
    critical: Sequence[TimeRecord] = ()
    ranks: Sequence[int] = ()
    steps: tuple[int, int] | None = None
    began: int | None = None

    @classmethod
    def read(cls, run: RunDir) -> AttemptTimes:
        """Read the attempt `run.attempt`. Never raises."""
        best: tuple[int, float] | None = None
        critical: Sequence[TimeRecord] = ()
        ranks: list[int] = []
        spans: list[tuple[int, int]] = []
        began: list[int] = []
        for rank in ranks_of(run):
            if not (records := list(records_of(run, rank))):
                continue
            ranks.append(rank)
            spans.append((min(r.steps[0] for r in records), max(r.steps[1] for r in records)))
            if records[-1].steps[1] > records[0].steps[0]:
                began.append(records[0].steps[0])
            key = (-records[-1].steps[1], sum(r.wait_s for r in records))
            if best is None or key < best:
                best, critical = key, records
        steps = (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None
        return cls(run, critical, ranks, steps, min(began, default=None))

    def by_rank(self) -> Iterator[tuple[int, Iterator[TimeRecord]]]:
        """All records again, rank by rank, including records added since `read`."""
        for rank in self.ranks:
            yield rank, records_of(self.run, rank)


def times_of(run: RunDir) -> list[AttemptTimes]:
    """The times of each attempt of a run, in order."""
    return [AttemptTimes.read(RunDir(run.path, int(path.name))) for path in run.attempts()]
