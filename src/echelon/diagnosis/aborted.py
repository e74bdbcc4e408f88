"""What a process said in C++ before it aborted itself: the text of an exception that nobody caught, and NCCL's threads.

On a GPU a rank that waits for another does not raise: a thread of torch's NCCL backend, its watchdog, sees that a collective is
late and aborts the process, which is then the first to fail although it only waited. Gloo's threads abort as well, when a peer
is lost. `diagnosis.lost_peers` tells these from a rank's own errors, such as one of its device, which the watchdog reports, too.

The texts are those of torch 2.11 to 2.13; in the words of others a rank that aborts is taken to have failed by itself.
"""

from __future__ import annotations

import re

from echelon.common.terminal import one_line

__all__ = ["ABORTS", "DAMAGED", "TAIL_BYTES", "abort_message"]

# By which a process ends that aborts itself: what writes down its threads' stacks may fall over one of them.
ABORTS = ("SIGABRT", "SIGSEGV")

DAMAGED = r"(?:double free|corrupted |free\(\)|malloc\w{0,20}\(\)|realloc\(\)|munmap_chunk\(\)|\*\*\* stack smashing)"
TAIL_BYTES = 256 << 10  # of a log, its end: stacks of C++ follow the words
# What NCCL adds on the next lines; the rest of the lines is advice and stacks.
_MORE = r"[^\n]{1,1000}(?:\nnccl[A-Z]\w{1,40}:[^\n]{0,300})?(?:\nLast error:\s{0,4}[^\n]{1,500})?"
# What ended it comes before what it said earlier, and what the watchdog heard before it saw the error itself.
_WORDS = (
    re.compile(rf"watchdog thread terminated with exception: ({_MORE})"),
    re.compile(rf"^terminate called [^\n]{{0,300}}\n\s{{0,8}}what\(\): {{0,4}}({_MORE})", re.MULTILINE),
    # A check in C, and the C library's own, of a heap or a stack that somebody has damaged.
    re.compile(r"^([^\n]{1,500}: Assertion [^\n]{1,500} failed\.?)$", re.MULTILINE),
    re.compile(rf"^({DAMAGED}[^\n]{{0,200}})$", re.MULTILINE),
    re.compile(rf"\) raised the following async exception: ({_MORE})"),
    re.compile(r"(Watchdog caught collective operation timeout: WorkNCCL[^\n]{0,1000})"),
    re.compile(r"(Received a dump signal due to a collective timeout from {1,3}(?:this local rank|rank -?\d{1,7}))"),
    re.compile(r"(ProcessGroupNCCL's watchdog got stuck for \d{1,7} seconds without making progress)"),
    re.compile(r"Terminating the process after attempting to dump debug info, (due to ProcessGroupNCCL [^\n.]{1,100})"),
)


def abort_message(log: str) -> str:
    """The first of the weightiest of them, each of its lines clean; empty if there are none."""
    words = next((match[1] for pattern in _WORDS if (match := pattern.search(log)) is not None), "")
    return "\n".join(one_line(line.strip()) for line in words.splitlines() if line.strip())
