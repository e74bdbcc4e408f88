"""How much memory this process takes while something runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta

import psutil

__all__ = ["RSSProfiler", "measure_rss_deltas"]

_INTERVAL = timedelta(milliseconds=100)


@contextlib.contextmanager
def measure_rss_deltas(rss_deltas: list[int], interval: timedelta = _INTERVAL) -> Iterator[None]:
    """Append to `rss_deltas`, now and again, by how many bytes this process's resident memory has grown since the beginning.

    At least once: when the context ends.

    Args:
        interval: between two measurements.
    """
    process, done = psutil.Process(), threading.Event()
    baseline = process.memory_info().rss

    def measure() -> None:
        while not done.wait(interval.total_seconds()):
            rss_deltas.append(process.memory_info().rss - baseline)

    thread = threading.Thread(target=measure, name="measure_rss", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        rss_deltas.append(process.memory_info().rss - baseline)


class RSSProfiler:
    """Measures how this process's resident memory grows, under names.

    Args:
        interval: between two measurements.
    Attributes:
        rss_deltas_bytes: by name, see `measure_rss_deltas`.
    """

    def __init__(self, interval: timedelta = _INTERVAL) -> None:
        self.interval = interval
        self.rss_deltas_bytes: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def profile(self, name: str) -> Iterator[None]:
        """Context that is measured; what was measured under the name before is kept."""
        with measure_rss_deltas(self.rss_deltas_bytes.setdefault(name, []), self.interval):
            yield

    def reset(self) -> None:
        """Forget what was measured."""
        self.rss_deltas_bytes = {}
