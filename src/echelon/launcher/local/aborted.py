"""What NCCL's threads said before they ended a rank: these kill the process without a word of Python's.

On a GPU a rank that waits for another does not raise: a thread of torch's NCCL backend, its watchdog, sees that a collective is
late and aborts the process, which is then the first to fail although it only waited. The text is in the rank's log. An error of
the device itself, which the same thread reports, is the rank's own.

The texts are those of torch 2.11 to 2.13; in the words of others a rank that aborts is taken to have failed by itself, as before.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["last_words"]

_TAIL_BYTES = 256 << 10  # with the stacks of C++ that follow the words
# A collective that timed out here; one that timed out elsewhere, which the others are told of; what ends the watchdog.
_WORDS = re.compile(
    r"Watchdog caught collective operation timeout: .*|Received a dump signal due to a collective timeout from .*"
    r"|(?<=terminated with exception: ).*"
)


def last_words(log: Path) -> str:
    """The first of them in the end of a log, on one line; empty if there are none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    found = _WORDS.search(text)
    return found[0].strip()[:1000] if found is not None else ""
