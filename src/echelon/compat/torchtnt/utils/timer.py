"""torchtnt.utils.timer: a timer for named stages, which the loops take as `timer`, and its table."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from echelon.common.errors import UsageError

__all__ = ["Timer", "get_timer_summary"]

logger = logging.getLogger(__name__)


class Timer:
    """Records how long named stages take. A stage that ends in an exception is not recorded.

    Args:
        cuda_sync: wait for the GPU before and after a stage, so that its work is measured, not only its launch. This slows
            training down, so it is off by default.
        verbose: log every duration.
    Attributes:
        recorded_durations: seconds, by name.
    Raises:
        UsageError: cuda_sync without CUDA.
    """

    def __init__(self, *, cuda_sync: bool | None = None, verbose: bool = False) -> None:
        if cuda_sync and not torch.cuda.is_available():
            raise UsageError("CUDA must be available in order to enable CUDA synchronization. Leave cuda_sync out.")
        self.cuda_sync, self.verbose = bool(cuda_sync), verbose
        self.recorded_durations: dict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def time(self, action_name: str) -> Iterator[None]:
        """Context whose duration is recorded under a name."""
        start = self._now()
        yield
        seconds = self._now() - start
        if self.verbose:
            logger.info("%s took %s seconds.", action_name, seconds)
        self.recorded_durations[action_name].append(seconds)

    def _now(self) -> float:
        if self.cuda_sync:
            torch.cuda.synchronize()
        return time.perf_counter()

    def reset(self) -> None:
        """Forget all durations."""
        self.recorded_durations = defaultdict(list)


def get_timer_summary(timer: Any) -> str:
    """A table of a timer's durations, the longest first; only the heading if there are none."""
    sums = {name: (len(each), float(sum(each))) for name, each in timer.recorded_durations.items() if each}
    if not sums:
        return f"Timer Report{os.linesep}"
    whole = sum(seconds for _, seconds in sums.values())
    rows = [("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")]
    rows.append(("Total", "-", str(sum(calls for calls, _ in sums.values())), f"{whole:.5}", "100 %"))
    for name, (calls, seconds) in sorted(sums.items(), key=lambda item: item[1][1], reverse=True):
        share = 100.0 * seconds / whole if whole else 0.0
        rows.append((name, f"{seconds / calls:.5}", str(calls), f"{seconds:.5}", f"{share:.5}"))
    widest = max(len(row[0]) for row in rows)
    lines = ["|".join(("", f"  {row[0]:<{widest}}\t", *(f"  {cell:<15}\t" for cell in row[1:]), "")) for row in rows]
    rule = "-" * (len(lines[0].expandtabs()))
    return os.linesep.join(("Timer Report", "", rule, lines[0], rule, lines[1], rule, *lines[2:], rule, ""))
