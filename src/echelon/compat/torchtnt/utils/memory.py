"""torchtnt.utils.memory."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from enum import Enum
from typing import Any

import psutil
import torch

__all__ = ["RSSProfiler", "get_tensor_size_bytes_map", "measure_rss_deltas"]

_INTERVAL = timedelta(milliseconds=100)


def get_tensor_size_bytes_map(obj: object) -> dict[torch.Tensor, int]:
    """The tensors within an object, however deep, and the bytes of each. Each once, also where objects refer to one another."""
    found: dict[torch.Tensor, int] = {}
    seen: dict[int, Any] = {}  # with the objects, since the number of one that is gone may be another's
    left: deque[Any] = deque([obj])
    while left:
        value = left.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            found[value] = value.numel() * value.element_size()
        elif isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, (Sequence, AbstractSet)) and not isinstance(value, (str, bytes, bytearray, range)):
            left.extend(value)
        elif hasattr(value, "__dict__") and not isinstance(value, (Enum, type)):
            left.extend(vars(value).values())
    return found


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
