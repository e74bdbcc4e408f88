"""Errors of a rank that only follow from another rank: its connection broke, it did not come, or it passed on its own error.

A connection to something else, such as a data server or a data worker, breaks with the same words. So these count only from gloo,
NCCL and torch's store, by the names in the message or by the file that raised it.
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
# The words of gloo, NCCL and the store for a broken connection.
_LOST = re.compile(
    r"Connection (closed|reset) by (peer|remote)|Connection refused|Broken pipe|remote process exited"
    r"|(got|sent) 0 bytes|NCCL communicator was aborted|ncclRemoteError"
    r"|Socket closed|Socket recv failed while polling|Software caused connection abort"
    r"|dump signal due to a collective timeout"
    # Gloo reports its own missing resources, and sizes that do not fit, under the same path.
    r"|gloo/transport(?![^\n]{0,1000}(Unable to|op\.preamble))",
    re.IGNORECASE,
)
# Words for a peer that is there but did not come: gloo's, those of its store, and echelon's for both. A watchdog that hangs does
# so in a device call, most often one that waits for other ranks.
_WAITED = re.compile(
    r"Timed out waiting \d+ ?ms for|timeout caused pair closure|wait timeout after \d+ ?ms|collective operation timeout"
    r"|could not join at MASTER_ADDR=|failed to pass monitoredBarrier|Socket Timeout|Timeout waiting for key"
    r"|watchdog got stuck for \d+ seconds|ProcessGroupNCCL watchdog hang",
    re.IGNORECASE,
)
# NCCL also aborts its connections after an error of the rank's own device, and says so.
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
    """Whether the error is another rank's, passed on to this one."""
    return _TOLD.search(_RAISED.split(traceback[-_MOST:])[-1]) is not None


def error_before(traceback: str) -> str:
    """The second to last of chained exceptions, if no exception before the last is about another rank; else empty.

    A rank that raises and then calls a collective in `finally` fails there because the others are not there.
    """
    *before, _ = _RAISED.split(traceback[-_MOST:])
    before = [part for part in before if part.strip()]
    return before[-1] if before and not any(lost_peer(part) or gave_up_waiting(part) for part in before) else ""


def _of_groups(traceback: str) -> Iterator[str]:
    """The messages of chained exceptions that torch's process groups may have raised; indented lines are code.

    Chosen by words, or else by the file that raised them. Python's own errors are never chosen, whatever a user wrote in them.
    """
    for part in _RAISED.split(traceback[-_MOST:]):
        message = "\n".join(line for line in part.splitlines() if line[:1].strip())
        files = _FILE.findall(part)
        if not _OF_PROGRAMS.match(message) and (_OF_GROUPS.search(message) or _IN_TORCH.search(files[-1] if files else "")):
            yield message
