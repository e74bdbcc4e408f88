"""Streams whose own state loses samples: the content of a shuffle buffer.

In Hugging Face `datasets`, the state of a streamed dataset with `.shuffle(buffer_size=...)` holds the position of its source, but
not the content of the buffer: a run that resumes from it misses up to a buffer of samples. The state does not tell, and a
dataset's stages have no public names. Written for datasets 5; a test in tests/data/test_data_hf.py notices a change.
"""

from __future__ import annotations

from typing import Any

__all__ = ["shuffle_buffer"]

# Attributes of a dataset, or of a stage, that hold what it reads from.
_INNER = ("_ex_iterable", "ex_iterable", "ex_iterables")


def shuffle_buffer(dataset: Any) -> int:
    """How many samples a dataset's state can lose; 0 if it has no shuffle buffer, or is of an unknown kind."""
    pending, largest = [dataset], 0
    while pending:
        stage = pending.pop()
        if type(stage).__name__ == "BufferShuffledExamplesIterable":
            largest = max(largest, int(stage.buffer_size))
        inner = [getattr(stage, name, None) for name in _INNER]
        pending += [each for one in inner if one is not None for each in (one if isinstance(one, list) else [one])]
    return largest if largest > 1 else 0
