"""The history of CUDA's allocator, for pytorch.org/memory_viz.

torch documents these functions ("Understanding CUDA Memory Usage") but gives them private names; there is no other access to the
history. The arguments are those of torch 2.11 to 2.13; test_profile.py notices when the functions are gone.
"""

from __future__ import annotations

import torch

__all__ = ["begin", "end", "write"]

_ENTRIES = 100_000  # the latest allocations and frees


def begin() -> None:
    torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)


def write(path: str) -> None:
    torch.cuda.memory._dump_snapshot(path)


def end() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)
