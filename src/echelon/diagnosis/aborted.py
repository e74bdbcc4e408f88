"""What a process printed in C++ before it aborted: an uncaught exception, or the messages of NCCL's threads.

On a GPU a rank that waits for another does not raise. The watchdog, a thread of torch's NCCL backend, sees that a collective is
late and aborts the process, which then fails first although it only waited. Gloo's threads abort too when a peer is lost.
`diagnosis.lost_peers` tells these aborts from a rank's own errors, such as device errors, which the watchdog also reports.

The texts are those of torch 2.11 to 2.13. A rank that aborts with other texts counts as having failed by itself.
"""

from __future__ import annotations

import re

from echelon.common.terminal import one_line

__all__ = ["ABORTS", "DAMAGED", "TAIL_BYTES", "abort_message", "dump_of_end", "first_signal"]

ABORTS = ("SIGABRT", "SIGSEGV")  # that may end a process that aborts

DAMAGED = r"(?:double free|corrupted |free\(\)|malloc\w{0,20}\(\)|realloc\(\)|munmap_chunk\(\)|\*\*\* stack smashing)"
_FATAL = "Fatal Python error: "
TAIL_BYTES = 256 << 10  # read from the end of a log: C++ stacks follow the message
# NCCL's continuation lines; the remaining lines are advice and stacks.
_MORE = r"[^\n]{1,1000}(?:\nnccl[A-Z]\w{1,40}:[^\n]{0,300})?(?:\nLast error:\s{0,4}[^\n]{1,500})?"
# In order of weight: the error that ended the process, then earlier messages, then what made the watchdog suspicious.
_WORDS = (
    re.compile(rf"watchdog thread terminated with exception: ({_MORE})"),
    re.compile(rf"^terminate called [^\n]{{0,300}}\n\s{{0,8}}what\(\): {{0,4}}({_MORE})", re.MULTILINE),
    # A failed assertion in C, and the C library's message about a damaged heap or stack.
    re.compile(r"^([^\n]{1,500}: Assertion [^\n]{1,500} failed\.?)$", re.MULTILINE),
    re.compile(rf"^({DAMAGED}[^\n]{{0,200}})$", re.MULTILINE),
    re.compile(rf"\) raised the following async exception: ({_MORE})"),
    re.compile(r"(Watchdog caught collective operation timeout: WorkNCCL[^\n]{0,1000})"),
    re.compile(r"(Received a dump signal due to a collective timeout from {1,3}(?:this local rank|rank -?\d{1,7}))"),
    re.compile(r"(ProcessGroupNCCL's watchdog got stuck for \d{1,7} seconds without making progress)"),
    re.compile(r"Terminating the process after attempting to dump debug info, (due to ProcessGroupNCCL [^\n.]{1,100})"),
)


def dump_of_end(log: str) -> str:
    """What faulthandler wrote as the process ended, from the signal's name on; empty if it wrote nothing.

    A crash while it prints leaves the words "Segmentation fault" after it, with no stack: the first dump counts.
    """
    before, _, last = log.rpartition(_FATAL)
    if last.startswith("Segmentation fault") and '  File "' not in last and _FATAL in before:
        return before.rpartition(_FATAL)[2]
    return last if _FATAL in log else ""


def first_signal(name: str, log: str) -> str:
    """The signal that came first: an abort ends as SIGSEGV if printing the threads' stacks crashes.

    Args:
        name: of the signal that ended the process.
        log: the end of what it wrote.
    """
    return "SIGABRT" if name == "SIGSEGV" and dump_of_end(log).startswith("Aborted") else name


def abort_message(log: str) -> str:
    """The message of the first pattern that matches, with each line cleaned; empty if none does."""
    words = next((match[1] for pattern in _WORDS if (match := pattern.search(log)) is not None), "")
    return "\n".join(one_line(line.strip()) for line in words.splitlines() if line.strip())
