"""What the memory of a GPU is used for, written down for torch's viewer; and which errors mean that memory ran out."""

from __future__ import annotations

import logging
import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import torch

from echelon.contracts.errors import UsageError
from echelon.world.init import World

__all__ = [
    "MemorySnapshotParams",
    "MemorySnapshotProfiler",
    "MemorySnapshotProfilerBase",
    "attach_oom_observer",
    "is_out_of_cpu_memory",
    "is_out_of_cuda_memory",
    "is_out_of_memory_error",
    "log_memory_snapshot",
]

logger = logging.getLogger(__name__)

_CUDA_TEXTS = (
    "CUDA out of memory",
    "out of memory\nCUDA kernel errors",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Whether the error says that the host's memory ran out."""
    if isinstance(exception, MemoryError):
        return True
    return isinstance(exception, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(exception)


def is_out_of_cuda_memory(exception: BaseException) -> bool:
    """Whether the error says that a GPU's memory ran out."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    text = str(exception)
    older = "cuda runtime error (2) : out of memory"
    return isinstance(exception, RuntimeError) and (older in text or any(each in text for each in _CUDA_TEXTS))


def is_out_of_memory_error(exception: BaseException) -> bool:
    """Whether the error says that memory ran out, the host's or a GPU's."""
    return is_out_of_cpu_memory(exception) or is_out_of_cuda_memory(exception)


def log_memory_snapshot(output_dir: str, file_prefix: str | None = None) -> None:
    """Write what is allocated now, and the recorded history, into `<output_dir>/<file_prefix>_rank<n>`.

    `snapshot.pickle` for the viewer at pytorch.org/memory_viz, and two pages to open. Nothing without CUDA; what fails is
    logged, since this runs where memory has run out.

    Args:
        output_dir: a folder, or an fsspec URL.
        file_prefix: by default "memory_snapshot".
    """
    if not torch.cuda.is_available():
        logger.info("no CUDA here, so no memory snapshot")
        return
    folder = f"{output_dir.rstrip('/')}/{file_prefix or 'memory_snapshot'}_rank{World.current(torch.device('cpu')).rank}"
    try:
        snapshot = torch.cuda.memory._snapshot()  # torch documents it; there is no name without the underscore
        _write(folder, snapshot)
    except Exception:
        logger.exception("the memory snapshot %s could not be written", folder)
    else:
        logger.info("wrote the memory snapshot %s", folder)


def _write(folder: str, snapshot: dict[str, Any]) -> None:
    from torch.cuda import _memory_viz

    with _open(f"{folder}/snapshot.pickle") as file:
        pickle.dump(snapshot, file)
    for name, draw in (("trace_plot", _memory_viz.trace_plot), ("segment_plot", _memory_viz.segment_plot)):
        with _open(f"{folder}/{name}.html") as file:
            file.write(draw(snapshot).encode())


def _open(path: str) -> IO[bytes]:
    if "://" not in path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(path).open("wb")
    import fsspec

    filesystem, inside = fsspec.core.url_to_fs(path)
    filesystem.makedirs(inside.rpartition("/")[0], exist_ok=True)
    opened: IO[bytes] = filesystem.open(inside, "wb")
    return opened


def attach_oom_observer(output_dir: str, trace_max_entries: int = 1000000) -> None:
    """Record allocations from now on, and write a snapshot with the prefix "oom" when a GPU's memory runs out.

    Args:
        trace_max_entries: how many of the latest events are kept.
    """
    if not torch.cuda.is_available():
        logger.info("no CUDA here, so no observer of its memory")
        return

    def observe(device: int, wanted: int, allocated: int, free: int) -> None:
        logger.info("cuda:%s ran out of memory: %s wanted, %s used, %s free", device, *map(_size, (wanted, allocated, free)))
        log_memory_snapshot(output_dir, "oom")

    torch.cuda.memory._record_memory_history(enabled="all", max_entries=trace_max_entries)
    torch._C._cuda_attach_out_of_memory_observer(observe)  # type: ignore[attr-defined]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.2f} MiB"


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
        if start is not None and (start < 0 or stop is None or start >= stop):
            raise UsageError(f"start_step {start}, stop_step {stop}: 0 <= start_step < stop_step.")
        if stop is not None and stop <= 0:
            raise UsageError(f"stop_step {stop}: at least 1.")
        if start is None and not observes:
            raise UsageError("nothing would be recorded: give start_step and stop_step, or enable_oom_observer=True.")
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
            logger.warning("no CUDA here, so no memory history")
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
