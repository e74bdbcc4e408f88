"""torchtnt.utils.memory_snapshot_profiler."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch

from echelon.common.errors import UsageError
from echelon.compat.torchtnt.utils.oom import attach_oom_observer, log_memory_snapshot

__all__ = ["MemorySnapshotParams", "MemorySnapshotProfiler", "MemorySnapshotProfilerBase"]

logger = logging.getLogger(__name__)


@dataclass
class MemorySnapshotParams:
    """When a MemorySnapshotProfiler records.

    Args:
        start_step: the step from which on; None records only for the observer.
        stop_step: the step at which a snapshot is written and recording ends; None never ends it.
        max_entries: how many of the latest events are kept.
        enable_oom_observer: write a snapshot when memory runs out. Records from the beginning.
    """

    start_step: int | None = None
    stop_step: int | None = 2
    max_entries: int = 100000
    enable_oom_observer: bool = True


class MemorySnapshotProfilerBase(ABC):
    """What is told of each step, and may write memory snapshots. A context that starts and stops it."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def step(self) -> None: ...


class MemorySnapshotProfiler(MemorySnapshotProfilerBase):
    """Records the allocations of a GPU's memory between two steps and writes a snapshot at the second.

    Make it before the model, so that what stays allocated is known too. The callback MemorySnapshot calls `step`.

    Args:
        output_dir: a folder, or an fsspec URL.
        memory_snapshot_params: see there.
    Raises:
        UsageError: steps that cannot be, or nothing to record.
    """

    def __init__(self, output_dir: str, memory_snapshot_params: MemorySnapshotParams | None = None) -> None:
        self.output_dir, self.params = output_dir, memory_snapshot_params or MemorySnapshotParams()
        start, stop, observes = self.params.start_step, self.params.stop_step, self.params.enable_oom_observer
        if start is not None and start < 0:
            raise UsageError("start_step must be nonnegative.")
        if start is not None and stop is None:
            raise UsageError("stop_step must be specified when start_step is set.")
        if start is not None and stop is not None and start >= stop:
            raise UsageError("start_step must be < stop_step.")
        if stop is not None and stop <= 0:
            raise UsageError("stop_step must be positive.")
        if start is None and not observes:
            raise UsageError(
                "At least one of start_step/stop_step or enable_oom_observer must be set."
                if stop is None
                else "stop_step must be enabled with either start_step or enable_oom_observer."
            )
        self.step_num, self.is_started = 0, False
        if observes:
            attach_oom_observer(output_dir, self.params.max_entries)
        if start == 0:
            self.start()

    def start(self) -> None:
        """Begin to record."""
        if self.is_started:
            return
        if not torch.cuda.is_available():
            logger.warning("CUDA unavailable. Not recording memory history.")
            return
        torch.cuda.memory._record_memory_history(max_entries=self.params.max_entries)
        self.is_started = True

    def stop(self) -> None:
        """End recording, also what the observer began."""
        recording = self.is_started or self.params.enable_oom_observer
        if recording and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(enabled=None)
        self.is_started = False

    def step(self) -> None:
        """A step is done."""
        self.step_num += 1
        if self.step_num == self.params.start_step:
            self.start()
        if self.step_num == self.params.stop_step:
            log_memory_snapshot(self.output_dir, f"step_{self.step_num}")
            self.stop()

    def log_memory_snapshot(self) -> None:
        """Write a snapshot now."""
        log_memory_snapshot(self.output_dir, f"step_{self.step_num}")
