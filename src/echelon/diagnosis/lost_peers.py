"""Which errors of a rank only follow from another rank: a connection to it broke, it did not come, or it told of its own.

A connection to somewhere else, such as a server of data or a process that loads it, breaks with the same words. So those count
only from gloo, NCCL and torch's store, by the names in the message or the file that raised it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from echelon.common.errors import TOLD_BY

__all__ = ["error_before", "gave_up_waiting", "lost_peer", "told_by_another"]

_TOLD = re.compile(rf"^{TOLD_BY} \d+\.$", re.MULTILINE)
_MOST = 100_000  # of a traceback, its end
_RAISED = re.compile(
    r"^(?:Traceback \(most recent call last\)|The above exception was the direct cause|During handling of).*$", re.MULTILINE
)
_FILE = re.compile(r'^  File "([^"\n]{1,4096})"', re.MULTILINE)
# gloo's, NCCL's and the store's words for a connection that went away.
_LOST = re.compile(
    r"Connection (closed|reset) by (peer|remote)|Connection refused|Broken pipe|remote process exited"
    r"|(got|sent) 0 bytes|NCCL[^\n]{0,300}(remote|abort)"
    r"|Socket closed|Socket recv failed while polling|Software caused connection abort"
    r"|dump signal due to a collective timeout"
    # Gloo says what it lacks before it has a peer, and what does not fit, in the same place.
    r"|gloo/transport(?![^\n]{0,1000}(Unable to|op\.preamble))",
    re.IGNORECASE,
)
# And for one that is there, and did not come: gloo's words, those of its store, and ours for both. A watchdog that stands still
# does so in a call of the device's, most often one that waits for other ranks.
_WAITED = re.compile(
    r"Timed out waiting \d+ ?ms for|timeout caused pair closure|wait timeout after \d+ ?ms|collective operation timeout"
    r"|could not join at MASTER_ADDR=|failed to pass monitoredBarrier|Socket Timeout|Timeout waiting for key"
    r"|watchdog got stuck for \d+ seconds|ProcessGroupNCCL watchdog hang",
    re.IGNORECASE,
)
# NCCL aborts its connections for an error of the rank's own device, too, and then says so.
_OF_DEVICE = re.compile(r"unhandled cuda error|CUDA error|Cuda failure", re.IGNORECASE)
_OF_GROUPS = re.compile(
    r"gloo|nccl|c10d|TCPStore|SocketImpl|collective timeout|MASTER_ADDR=|monitoredBarrier|Dist(Network|Store|Backend)Error",
    re.IGNORECASE,
)
_OF_PROGRAMS = re.compile(r"(Value|Key|Index|Type|Attribute|Assertion|NotImplemented|FileNotFound)Error\b")
_IN_TORCH = re.compile(r"[/\\]torch[/\\](?!utils[/\\]data[/\\]|multiprocessing[/\\]|hub\.py)")


def lost_peer(traceback: str) -> bool:
    """Whether one of the chained exceptions says that the connection to another rank broke."""
    return any(_LOST.search(message) is not None and not _OF_DEVICE.search(message) for message in _of_groups(traceback))


def gave_up_waiting(traceback: str) -> bool:
    """Whether one of the chained exceptions says that another rank did not come in time."""
    return any(_WAITED.search(message) is not None for message in _of_groups(traceback))


def told_by_another(traceback: str) -> bool:
    """Whether the error is another rank's, of which this one was told."""
    return _TOLD.search(_RAISED.split(traceback[-_MOST:])[-1]) is not None


def error_before(traceback: str) -> str:
    """Of chained exceptions the last but one, if none of those before the last is about another rank; else empty.

    A rank that raises, and then calls a collective in `finally`, fails there for want of the others.
    """
    *before, _ = _RAISED.split(traceback[-_MOST:])
    before = [part for part in before if part.strip()]
    return before[-1] if before and not any(lost_peer(part) or gave_up_waiting(part) for part in before) else ""


def _of_groups(traceback: str) -> Iterator[str]:
    """The message of each chained exception that torch's groups of ranks may have raised; code is indented.

    By its words, or else by the file that raised it. Errors of the language itself are never theirs, whatever a user wrote.
    """
    for part in _RAISED.split(traceback[-_MOST:]):
        message = "\n".join(line for line in part.splitlines() if line[:1].strip())
        files = _FILE.findall(part)
        if not _OF_PROGRAMS.match(message) and (_OF_GROUPS.search(message) or _IN_TORCH.search(files[-1] if files else "")):
            yield message
