"""What the times of all ranks of an attempt say together, read rank by rank: a day of a thousand ranks is six million records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.contracts.run_dir import RunDir
from echelon.contracts.times import TimeRecord, ranks_of, records_of

__all__ = ["AttemptTimes", "times_of"]


@dataclass(frozen=True)
class AttemptTimes:
    """An attempt's times, of which those of one rank are held.

    Args:
        critical: of the rank that came furthest; among equals, of the one that waited least: its data is what all waited for.
        ranks: that have written any, in order.
        steps: the lowest and the highest in any of them; None without any.
        began: the lowest step at which a rank began that took one; None if none did.
    """

    run: RunDir
    critical: Sequence[TimeRecord] = ()
    ranks: Sequence[int] = ()
    steps: tuple[int, int] | None = None
    began: int | None = None

    @classmethod
    def read(cls, run: RunDir) -> AttemptTimes:
        """Of the attempt `run.attempt`. Never an error."""
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
        """All records once more, those of one rank after the other; what came since is among them."""
        for rank in self.ranks:
            yield rank, records_of(self.run, rank)


def times_of(run: RunDir) -> list[AttemptTimes]:
    """Of each attempt of a run, in order."""
    return [AttemptTimes.read(RunDir(run.path, int(path.name))) for path in run.attempts()]
