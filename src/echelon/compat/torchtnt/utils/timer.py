"""torchtnt.utils.timer: timers for named stages, and what many durations come to: a table, percentiles, over all ranks.

Any of them may be given as `timer` to `train`, `evaluate`, `predict` and `fit`.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist

from echelon.common.errors import UsageError
from echelon.world import agree

__all__ = [
    "AggregatedTimer",
    "BoundedTimer",
    "FullSyncPeriodicTimer",
    "TimedActionStats",
    "Timer",
    "TimerProtocol",
    "TimerReport",
    "get_durations_histogram",
    "get_recorded_durations_table",
    "get_synced_durations_histogram",
    "get_synced_timer_histogram",
    "get_timer_summary",
    "log_elapsed_time",
]

logger = logging.getLogger(__name__)


@runtime_checkable
class TimerProtocol(Protocol):
    """A timer that keeps what it measured: seconds, by name, oldest first."""

    recorded_durations: dict[str, list[float]]

    def time(self, action_name: str) -> AbstractContextManager[Any]:
        """Context whose duration is recorded under a name."""

    def reset(self) -> None:
        """Forget all durations."""


@dataclass
class TimedActionStats:
    """What the durations of one name come to: seconds, and per cent of those of all names."""

    action_name: str
    mean_duration: float = 0.0
    num_calls: int = 0
    total_duration: float = 0.0
    percentage_of_total_time: float = 0.0


@dataclass
class TimerReport:
    """All names, the one that took longest first."""

    timed_action_stats: list[TimedActionStats]
    total_calls: int
    total_duration: float


class Timer:
    """Records how long named stages take. One that ends in an exception is no completed stage, and is not recorded.

    Args:
        cuda_sync: wait for the GPU before and after a stage, so that it is measured and not merely launched. This slows
            training down, so it is off by default.
        verbose: log every duration.
    Attributes:
        recorded_durations: seconds, by name.
    Raises:
        UsageError: cuda_sync without CUDA.
    """

    def __init__(self, *, cuda_sync: bool | None = None, verbose: bool = False) -> None:
        self.cuda_sync, self.verbose = _synchronizes(cuda_sync, default=False), verbose
        self.recorded_durations: dict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def time(self, action_name: str) -> Iterator[None]:
        """Context whose duration is recorded under a name."""
        start = _now(self.cuda_sync)
        yield
        seconds = _now(self.cuda_sync) - start
        if self.verbose:
            logger.info("%s took %s seconds.", action_name, seconds)
        self.record(action_name, seconds)

    def record(self, action_name: str, seconds: float) -> None:
        """Add a duration that was measured elsewhere."""
        self.recorded_durations[action_name].append(seconds)

    def reset(self) -> None:
        """Forget all durations."""
        self.recorded_durations = defaultdict(list)


class AggregatedTimer(Timer):
    """Keeps a count and a sum for each name instead of every duration, for runs of any length. `recorded_durations` is empty."""

    def __init__(self, cuda_sync: bool | None = None, verbose: bool = False) -> None:
        super().__init__(cuda_sync=cuda_sync, verbose=verbose)
        self.sums: dict[str, tuple[int, float]] = {}

    def record(self, action_name: str, seconds: float) -> None:
        count, total = self.sums.get(action_name, (0, 0.0))
        self.sums[action_name] = count + 1, total + seconds

    def reset(self) -> None:
        super().reset()
        self.sums = {}


class BoundsError(UsageError, AssertionError):
    """Bounds that cannot be."""


class BoundedTimer(Timer):
    """Keeps the latest durations of each name.

    Args:
        lower_bound: how many are left when there are too many.
        upper_bound: how many are too many.
    Raises:
        BoundsError, an AssertionError: bounds that are not 0 < lower_bound < upper_bound.
    """

    def __init__(self, lower_bound: int, upper_bound: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 < lower_bound < upper_bound:
            raise BoundsError(f"lower_bound {lower_bound}, upper_bound {upper_bound}: 0 < lower_bound < upper_bound.")
        self.lower_bound, self.upper_bound = lower_bound, upper_bound

    def record(self, action_name: str, seconds: float) -> None:
        super().record(action_name, seconds)
        durations = self.recorded_durations[action_name]
        if len(durations) >= self.upper_bound:
            del durations[: -self.lower_bound]


def _synchronizes(cuda_sync: bool | None, *, default: bool) -> bool:
    if cuda_sync and not torch.cuda.is_available():
        raise UsageError("CUDA must be available in order to enable CUDA synchronization. Leave cuda_sync out.")
    return default if cuda_sync is None else cuda_sync


def _now(cuda_sync: bool) -> float:
    if cuda_sync:
        torch.cuda.synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def log_elapsed_time(action_name: str, *, cuda_sync: bool | None = None) -> Iterator[None]:
    """Log how long what is inside took, also if it ends in an exception.

    Args:
        cuda_sync: wait for the GPU before and after; by default if there is one.
    Raises:
        UsageError: cuda_sync without CUDA.
    """
    waits = _synchronizes(cuda_sync, default=torch.cuda.is_available())
    start = _now(waits)
    try:
        yield
    finally:
        logger.info("%s took %s seconds", action_name, _now(waits) - start)


def report_of(timer: Any) -> TimerReport:
    """What a timer's durations come to."""
    if isinstance(timer, AggregatedTimer):
        sums: Mapping[str, tuple[int, float]] = timer.sums
    else:
        sums = {name: (len(each), float(sum(each))) for name, each in timer.recorded_durations.items() if each}
    total = sum(seconds for _, seconds in sums.values())
    rows = [TimedActionStats(n, s / c, c, s, 100.0 * s / total if total else 0.0) for n, (c, s) in sums.items()]
    rows.sort(key=lambda row: row.total_duration, reverse=True)
    return TimerReport(rows, sum(row.num_calls for row in rows), total)


def get_timer_summary(timer: Any) -> str:
    """A table of what a timer recorded, the longest first. Its heading alone if that is nothing."""
    report = report_of(timer)
    if not report.timed_action_stats:
        return f"Timer Report{os.linesep}"
    head = ("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")
    rows = [("Total", "-", str(report.total_calls), f"{report.total_duration:.5}", "100 %")]
    for each in report.timed_action_stats:
        mean, total, share = f"{each.mean_duration:.5}", f"{each.total_duration:.5}", f"{each.percentage_of_total_time:.5}"
        rows.append((each.action_name, mean, str(each.num_calls), total, share))
    widest = max(len(row[0]) for row in rows[1:])
    lines = ["|".join(("", f"  {row[0]:<{widest}}\t", *(f"  {cell:<15}\t" for cell in row[1:]), "")) for row in (head, *rows)]
    rule = "-" * (len(lines[0].expandtabs()))
    return os.linesep.join(("Timer Report", "", rule, lines[0], rule, lines[1], rule, *lines[2:], rule, ""))


def get_durations_histogram(
    recorded_durations: Mapping[str, Iterable[float]], percentiles: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Percentiles of the durations of each name, as "p50", and their mean, as "avg".

    A percentile is one of the durations, the largest that is not above it, and never a value between two of them. A name
    without durations is left out.

    Args:
        percentiles: each from 0 to 100.
    Raises:
        UsageError: a percentile outside.
    """
    wanted = _checked(percentiles)
    found: dict[str, dict[str, float]] = {}
    for name, durations in recorded_durations.items():
        values = np.asarray(list(durations), dtype=np.float64)
        if values.size:
            at = np.percentile(values, wanted, method="lower")
            found[name] = {f"p{p}": float(v) for p, v in zip(wanted, at, strict=True)} | {"avg": float(values.mean())}
    return found


def _checked(percentiles: Sequence[float]) -> list[float]:
    outside = [p for p in percentiles if not 0 <= p <= 100]
    if outside:
        raise UsageError(f"Percentile must be between 0 and 100. Got {outside[0]}")
    return sorted(percentiles)


def get_synced_durations_histogram(
    recorded_durations: Mapping[str, Iterable[float]], percentiles: Sequence[float], pg: dist.ProcessGroup | None = None
) -> dict[str, dict[str, float]]:
    """`get_durations_histogram` over the durations of all ranks, the same on each. Collective over `pg`.

    Raises:
        UsageError: a percentile outside; before the ranks meet.
    """
    _checked(percentiles)
    everyones: dict[str, list[float]] = {}
    for of_rank in agree.gather({name: [float(d) for d in each] for name, each in recorded_durations.items()}, pg):
        for name, durations in of_rank.items():
            everyones.setdefault(name, []).extend(durations)
    return get_durations_histogram(everyones, percentiles)


def get_synced_timer_histogram(
    timer: TimerProtocol, percentiles: Sequence[float], pg: dist.ProcessGroup | None = None
) -> dict[str, dict[str, float]]:
    """`get_synced_durations_histogram` of what a timer recorded. Collective over `pg`."""
    return get_synced_durations_histogram(timer.recorded_durations, percentiles, pg)


def get_recorded_durations_table(result: Mapping[str, Mapping[str, float]]) -> str:
    """A histogram as a table in Markdown; empty if it is."""
    columns = list(dict.fromkeys(column for row in result.values() for column in row))
    if not columns:
        return ""
    names = [name.ljust(max(len("Name") + 2, *map(len, result))) for name in ("Name", *result)]
    table = [names, *([f"{c:>{width}}", *cells] for c, cells, width in map(partial(_aligned, result.values()), columns))]
    table = [[column[0], _rule(column[0], left=column is names), *column[1:]] for column in table]
    return "\n" + "\n".join(f"|{'|'.join(cell if i == 1 else f' {cell} ' for cell in line)}|" for i, line in _lines(table))


def _lines(columns: Sequence[Sequence[str]]) -> Iterable[tuple[int, tuple[str, ...]]]:
    return enumerate(zip(*columns, strict=True))


def _rule(head: str, *, left: bool) -> str:
    dashes = "-" * (len(head) + 1)
    return f":{dashes}" if left else f"{dashes}:"


def _aligned(rows: Iterable[Mapping[str, float]], column: str) -> tuple[str, list[str], int]:
    """A column's numbers with three decimals at most, point below point, and its width."""
    cells = [f"{round(row[column], 3):g}" if column in row else "" for row in rows]
    decimals = max(len(cell.partition(".")[2]) + ("." in cell) for cell in cells)
    cells = [cell + " " * (decimals - len(cell.partition(".")[2]) - ("." in cell)) for cell in cells]
    width = max(len(column) + 2, *map(len, cells))
    return column, [cell.rjust(width) for cell in cells], width


class FullSyncPeriodicTimer:
    """Tells all ranks at the same call that an interval has passed, by rank 0's clock. No call waits for the network: it
    gives the answer to the question of the call before.

    Every rank of the group makes equally many calls.

    Args:
        interval: between two calls that say True, at the least.
        cpu_pg: a group for host memory (gloo).
    """

    def __init__(self, interval: datetime.timedelta, cpu_pg: dist.ProcessGroup) -> None:
        self._interval_s, self._group = interval.total_seconds(), cpu_pg
        self._since = time.perf_counter()
        self._value = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def check(self) -> bool:
        """Whether the interval had passed at the call before."""
        self.wait_remaining_work()
        passed = bool(self._value.item())
        if passed:
            self._since = time.perf_counter()
        self._value = torch.tensor([time.perf_counter() - self._since >= self._interval_s], dtype=torch.int32)
        # Of the group's first rank, which need not be the world's.
        self._work = dist.broadcast(self._value, group=self._group, group_src=0, async_op=True)
        return passed

    def wait_remaining_work(self) -> None:
        """Wait for the latest message, so that the group can be left."""
        if self._work is not None:
            self._work.wait()
            self._work = None
