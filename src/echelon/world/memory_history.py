"""The history of CUDA's allocator, for pytorch.org/memory_viz.

torch documents these functions ("Understanding CUDA Memory Usage") and keeps them under names with an underscore; there is no
other way to the history. Called with the arguments that torch 2.11 to 2.13 take; test_profile.py notices when they are
gone.
"""

from __future__ import annotations

import torch

__all__ = ["begin", "end", "write"]

_ENTRIES = 100_000  # allocations and frees, the latest


def begin() -> None:
    torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)


def write(path: str) -> None:
    torch.cuda.memory._dump_snapshot(path)


def end() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)
