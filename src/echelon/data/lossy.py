"""Streams whose own state does not hold all samples that they have read: a shuffle buffer's content is lost.

Hugging Face `datasets` gives a streamed dataset with `.shuffle(buffer_size=...)` a state that says where its source stands, and
not what the buffer held: a run that resumes from it misses up to a buffer of samples. The state does not say so, and there is no
public name for a dataset's stages; used with datasets 5, and a test in tests/data/test_data_hf.py notices a change.
"""

from __future__ import annotations

from typing import Any

__all__ = ["shuffle_buffer"]

# Of a dataset, and of a stage: what it reads from.
_INNER = ("_ex_iterable", "ex_iterable", "ex_iterables")


def shuffle_buffer(dataset: Any) -> int:
    """How many samples a dataset's state can be short of; 0 if it has no such buffer, or is of a kind that is not known here."""
    pending, largest = [dataset], 0
    while pending:
        stage = pending.pop()
        if type(stage).__name__ == "BufferShuffledExamplesIterable":
            largest = max(largest, int(stage.buffer_size))
        inner = [getattr(stage, name, None) for name in _INNER]
        pending += [each for one in inner if one is not None for each in (one if isinstance(one, list) else [one])]
    return largest if largest > 1 else 0
