"""Stragglers: ranks for which the others wait, and the cause, from the time that each rank spends outside of collectives.

Ranks that train together take equally long for a step, since they wait for the slowest. They differ in how much of the step they
compute and how much they wait. Only durations are compared, never the clocks of two machines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from echelon.contracts.times import TimeRecord

__all__ = ["Straggler", "stragglers"]

# A rank is slow if its own time per step is this many times the median of the others, exceeds it by this much,
_FACTOR = 1.5
_LEAST_S = 0.002
# and exceeds it by this share of the step; and if the others do wait.
_LEAST_OF_STEP = 0.1
# A rank is judged by its latest records, over this many steps and seconds; fewer than the second pair are not judged.
_STEPS, _SECONDS = 20, 1.0
_FEWEST_STEPS, _FEWEST_SECONDS = 10, 0.3
_MOST_RECORDS = 30
# A cause counts if it explains this share of a rank's excess. For disk less, since the kernel computes while it reads and writes.
_EXPLAINS = {"gc": 0.5, "disk": 0.3, "data": 0.5}

Cause = Literal["data", "compute", "gc", "disk"]


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for.

    Args:
        factor: its own time per step over the median of the other ranks.
        cause: "data": it waits for batches; "gc": it collects garbage; "disk": it waits for a file system; "compute": anything
        else.
        line: the line of the user's code with most of its own time; empty if unknown.
    """

    rank: int
    host: str
    factor: float
    cause: Cause
    line: str = ""

    def __str__(self) -> str:
        what = {"data": "its data", "compute": "its own computation", "gc": "collecting garbage", "disk": "its disk"}[self.cause]
        where = f" on {self.host}" if self.host else ""
        return (
            f"rank {self.rank}{where} takes {self.factor:.1f} x as long as the others: {what}{f', {self.line}' * bool(self.line)}"
        )


def stragglers(times: Mapping[int, Sequence[TimeRecord]]) -> list[Straggler]:
    """The present stragglers, the slowest first; empty for a healthy run, and while there are too few records.

    Args:
        times: the records of an attempt by rank, from `contracts.times.read_times`; the latest suffice.
    """
    alike: dict[str, list[_Usual]] = defaultdict(list)
    for rank, records in times.items():
        if (usual := _Usual.of(rank, records)) is not None:
            alike[usual.latest.role].append(usual)
    slow = [s for ranks in alike.values() if len(ranks) > 1 for s in _among(ranks)]
    return sorted(slow, key=lambda s: (-s.factor, s.rank))


@dataclass(frozen=True)
class _Usual:
    """A rank's usual step now, in seconds: medians over its latest records."""

    rank: int
    latest: TimeRecord
    line: str
    own: float  # own time of a usual step
    mean: float  # own time per step, including occasional work
    data: float
    gc: float
    disk: float
    wait: float
    wall: float

    @classmethod
    def of(cls, rank: int, records: Sequence[TimeRecord]) -> _Usual | None:
        """None if there are too few records. Leaves out a loop's first record, whose first steps may compile."""
        taken: list[TimeRecord] = []
        steps, seconds = 0, 0.0
        for record in reversed(records[1:]):
            if record.count:
                taken.append(record)
                steps, seconds = steps + record.count, seconds + record.wall_s
            if (steps >= _STEPS and seconds >= _SECONDS) or len(taken) == _MOST_RECORDS:
                break
        if steps < _FEWEST_STEPS or seconds < _FEWEST_SECONDS:
            return None

        def usual(values: Sequence[float]) -> float:
            return median(v for v, record in zip(values, taken, strict=True) for _ in range(max(1, 20 * record.count // steps)))

        def of_step(name: str) -> float:
            return usual([getattr(r, name) / r.count for r in taken])

        return cls(
            rank,
            taken[0],
            _line(taken),
            own=usual([r.own_s or _own(r) for r in taken]),
            mean=usual([_own(r) for r in taken]),
            data=of_step("data_s"),
            gc=of_step("gc_s"),
            disk=sum(r.disk_s for r in taken) / steps,  # from samples, of which a record has few
            wait=of_step("wait_s"),
            wall=usual([_wall(r) for r in taken]),
        )


def _own(record: TimeRecord) -> float:
    own = record.data_s + record.forward_s + record.backward_s + record.optimizer_s + record.other_s
    return max(0.0, own - record.queue_s) / record.count


def _wall(record: TimeRecord) -> float:
    return (record.wall_s - record.checkpoint_s - record.eval_s) / record.count


def _line(records: Sequence[TimeRecord]) -> str:
    """The line with most of the time."""
    lines: dict[str, float] = defaultdict(float)
    for record in records:
        lines[record.line] += record.wall_s
    lines.pop("", None)
    return max(lines, key=lambda line: lines[line], default="")


def _among(ranks: Sequence[_Usual]) -> list[Straggler]:
    """The stragglers among ranks of the same role."""
    slow = []
    others = {
        name: _median_of_others([getattr(r, name) for r in ranks]) for name in ("own", "mean", "data", "gc", "disk", "wait")
    }
    for i, rank in enumerate(ranks):

        def more(name: str, rank: _Usual = rank, i: int = i) -> float:
            return float(getattr(rank, name)) - others[name][i]

        if rank.wait >= others["wait"][i]:
            continue
        for own in ("own", "mean"):
            excess, usual = more(own), others[own][i]
            if excess < max(_LEAST_S, _LEAST_OF_STEP * rank.wall) or getattr(rank, own) < _FACTOR * usual:
                continue
            cause = next((c for c, share in _EXPLAINS.items() if more(c) >= share * excess), "compute")
            if own == "mean" and cause == "compute":  # only an occasional slow step, without a cause that explains it
                continue
            factor = getattr(rank, own) / max(usual, 1e-6)
            slow.append(Straggler(rank.rank, rank.latest.host, factor, cause, rank.line))  # type: ignore[arg-type]
            break
    return slow


def _median_of_others(values: Sequence[float]) -> list[float]:
    """For each value, the median of all the others."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    inner, medians = [values[i] for i in order], [0.0] * len(values)
    size = len(values) - 1
    for at, i in enumerate(order):
        low, high = (size - 1) // 2, size // 2
        medians[i] = (inner[low + (low >= at)] + inner[high + (high >= at)]) / 2
    return medians
