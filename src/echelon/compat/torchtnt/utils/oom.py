"""torchtnt.utils.oom: snapshots of what a GPU's memory is used for, for torch's viewer."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from echelon.world.init import World

__all__ = [
    "attach_oom_observer",
    "log_memory_snapshot",
]

logger = logging.getLogger(__name__)


def log_memory_snapshot(output_dir: str, file_prefix: str | None = None) -> None:
    """Write what is allocated now, and the recorded history, into `<output_dir>/<file_prefix>_rank<n>/snapshot.pickle`.

    The viewer at pytorch.org/memory_viz shows it. Does nothing without CUDA. A failure is only logged, since memory may have run
    out here.

    Args:
        file_prefix: by default "memory_snapshot".
    """
    if not torch.cuda.is_available():
        logger.info("CUDA unavailable. Not logging snapshot")
        return
    folder = Path(output_dir) / f"{file_prefix or 'memory_snapshot'}_rank{World.current(torch.device('cpu')).rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(folder / "snapshot.pickle"))  # torch documents it under this name
    except Exception as error:
        logger.exception("Failed to log memory snapshot to %s: %s", folder, error)
    else:
        logger.info("Logged memory snapshot to %s", folder)


def attach_oom_observer(output_dir: str, trace_max_entries: int = 1000000) -> None:
    """Record allocations from now on, and write a snapshot with the prefix "oom" when a GPU's memory runs out.

    Args:
        trace_max_entries: how many of the latest events are kept.
    """
    if not torch.cuda.is_available():
        logger.info("CUDA unavailable. Not attaching OOM observer.")
        return

    def observe(device: int, wanted: int, allocated: int, free: int) -> None:
        logger.info("cuda:%s ran out of memory: %s wanted, %s used, %s free", device, *map(_size, (wanted, allocated, free)))
        log_memory_snapshot(output_dir, "oom")

    torch.cuda.memory._record_memory_history(enabled="all", max_entries=trace_max_entries)
    torch._C._cuda_attach_out_of_memory_observer(observe)  # type: ignore[attr-defined]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.2f} MiB"
