"""A rank that failed by itself: what its signal or its error means, and what to do about it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.launcher.explain.evidence import Evidence, RankEvidence
from echelon.launcher.explain.flight import Wait
from echelon.launcher.explain.stacks import of_traceback, user_frame
from echelon.launcher.explain.verdict import Verdict
from echelon.launcher.explain.words import is_check, lost_data_worker, place, sentence, short, while_others, who
from echelon.launcher.job import Failure

__all__ = [
    "own_failure",
    "raised",
]

_SAME_MOMENT_NS = 2_000_000_000


@dataclass(frozen=True)
class _Kind:
    """A kind of error: how it is recognised in "Class: message", its cause, and the remedy."""

    pattern: str
    cause: str
    remedy: str


_DATA_WORKER = _Kind(
    r"(DataLoader|data) worker\b.*(exited|killed|died|ended|did not|gave no)|worker .* (was killed|died|exited)|"
    r"DataLoader timed out|received 0 items of ancdata",
    "data worker",
    "A process that loads data died or stood still: its log lines say more. /dev/shm or memory may be full; "
    "num_workers=0 shows the error itself.",
)
# The first that fits. Patterns are over "Class: message", where the message is the exception's own.
_KINDS = (
    _Kind(
        r"OutOfMemoryError\b|CUDA out of memory|CUDNN_STATUS_ALLOC_FAILED|CUBLAS_STATUS_ALLOC_FAILED",
        "device out of memory",
        "The device had no memory left. Use smaller micro-batches, activation checkpointing, or a strategy that shards.",
    ),
    _Kind(
        r"^MemoryError\b|can't allocate memory|[Cc]annot allocate memory|std::bad_alloc|Unable to allocate .* for an array",
        "host out of memory",
        "The machine, or the limit of this process (ulimit -v, a job's memory), had none left. Use fewer data workers or "
        "smaller batches, or ask for more memory.",
    ),
    _Kind(
        r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]|File too large|\[Errno 27\]",
        "disk full",
        "Make room, or write elsewhere; older checkpoints are as they were, and the same command goes on from the newest.",
    ),
    _Kind(
        r"Too many open files|\[Errno 2[34]\]",
        "too many open files",
        "See `ulimit -n`, and what is opened and not closed. Data workers hold a file for each tensor that they hand on: "
        'torch.multiprocessing.set_sharing_strategy("file_system") holds none.',
    ),
    _Kind(
        r"can't start new thread",
        "too many processes",
        "See `ulimit -u`, and the tasks that the job's cgroup may have: threads count, too.",
    ),
    _DATA_WORKER,
    _Kind(r"^DataError\b", "data", "The text names the sample."),
    _Kind(
        r"^NonFiniteError\b|^DivergedError\b|\bnon-?finite\b|is not finite|\bnan\b.*\bloss\b|\bloss\b.*\bnan\b",
        "not finite",
        "Look at that rank's batch, lower the learning rate, or clip.",
    ),
    _Kind(
        r"EADDRINUSE|[Aa]ddress already in use|seems to have that port|port another job's",
        "port in use",
        "Another process has the port, perhaps an earlier run's. End it, or choose another MASTER_PORT.",
    ),
    _Kind(
        r"did not come within|clients joined|could not join at|did not join|Timed out .*waiting for clients",
        "ranks missing",
        "Start as many ranks as WORLD_SIZE says, with the same MASTER_ADDR, and see that no firewall is between them.",
    ),
    _Kind(
        r"\bNCCL error\b|\bnccl(Unhandled|System|Internal|Invalid)\w*",
        "NCCL",
        "NCCL_DEBUG=INFO shows what it did before; `echelon doctor` tries the network and the devices.",
    ),
    _Kind(
        r"\bversions? (differ|disagree)|(differ|disagree|another)\b.*\b(versions?|code|hash|configuration)\b|another echelon",
        "ranks differ",
        "Start every rank with the same code, configuration and packages.",
    ),
    _Kind(r"ranks must run the same program|world size must be the same", "ranks differ", ""),
    _Kind(r"^RanksDisagreeError\b", "ranks disagree", ""),
    _Kind(r"^(LauncherEnvironmentError|UsageError)\b", "usage", ""),
    _Kind(
        r"^(CheckpointCorruptError|CheckpointMismatchError|CheckpointNotFoundError|CheckpointUnreadableError)\b", "checkpoint", ""
    ),
    _Kind(r"^CheckpointWriteError\b", "checkpoint", "The storage refused the save. Older checkpoints are as they were."),
    _Kind(r"^(ModuleNotFoundError|ImportError|SyntaxError|IndentationError)\b", "import", "Install it, or correct the file."),
    _Kind(
        r"modified by an inplace operation|Expected to have finished reduction in the prior iteration|marked (as )?ready twice",
        "exception",
        "",
    ),
)
_SIGNALS: Mapping[str, tuple[str, str]] = {
    "SIGSEGV": ("crash", "Code in C or C++ used memory that is not its own: an extension, a driver, or a fault of the machine."),
    "SIGBUS": ("crash", "Memory mapped from a file was not there: /dev/shm is full, or a file was cut short while it was read."),
    "SIGABRT": ("crash", "The process ended itself: a failed check in C++; its log has the words."),
    "SIGILL": ("crash", "A binary was built for another processor."),
    "SIGFPE": ("crash", "A whole number was divided by zero in C or C++."),
    "SIGALRM": ("killed", "A timer that the program itself had set ran out (signal.alarm, setitimer), and nothing handled it."),
    "SIGPIPE": ("killed", "It wrote to a pipe or socket that nobody reads, in code that does not look at that."),
    "SIGSYS": ("killed", "It made a call to the kernel that its container forbids (seccomp)."),
    "SIGXCPU": ("CPU limit", "It used all the processor time that it may have (ulimit -t)."),
    "SIGXFSZ": ("disk full", "A file became larger than it may be (ulimit -f)."),
}
_HEAD = "Traceback (most recent call last)"
_LAST_ERROR = re.compile(r"^Last error:\s*(\S[^\n]{0,1000})", re.MULTILINE)
_FROM_OUTSIDE = "Somebody or something outside the run did that: a person, the batch system, a machine going down."


def own_failure(evidence: Evidence, waits: Mapping[int, tuple[Wait, str]]) -> Verdict | None:
    """Of the rank that failed first by itself; None if none did.

    Ranks that failed in the same way at the same moment are guilty together: the program failed, not one of them.
    """
    own = [f for f in evidence.failures if not f.is_victim]
    rest = [f for f in own if not is_check(f)]
    if not rest:
        return None
    first = Failure.first(rest)
    if first.kind.startswith("SIG"):
        return _signalled(evidence, first, rest, waits)
    alike = [f for f in rest if _alike(f, first)]
    return raised(evidence, first, sorted(f.rank for f in alike), waits)


def _said(failure: Failure) -> str:
    return f"{failure.kind}: {failure.message}"


def _alike(failure: Failure, first: Failure) -> bool:
    frames = [f.user_frames[-1:] for f in (failure, first)]
    near = abs(failure.time_ns - first.time_ns) < _SAME_MOMENT_NS
    return failure.kind == first.kind and list(frames[0]) == list(frames[1]) and (near or failure.message == first.message)


def _signalled(evidence: Evidence, first: Failure, failures: Sequence[Failure], waits: Mapping[int, tuple[Wait, str]]) -> Verdict:
    alike = [f for f in failures if f.kind == first.kind and evidence.rank(f.rank).oom == evidence.rank(first.rank).oom]
    near = [f for f in alike if abs(f.time_ns - first.time_ns) < _SAME_MOMENT_NS]
    guilty = sorted(f.rank for f in near) if first.kind not in ("SIGABRT",) else [first.rank]
    rank = evidence.rank(first.rank)
    others = while_others(evidence, guilty, waits)
    where = place(rank)
    if rank.oom:
        headline = f"{who(guilty)} ran out of host memory"
        text = (
            f"{who(guilty)} {_was(guilty)} killed by the kernel's out-of-memory killer{where}{others}. The machine, or the "
            "memory that the job may have, was used up. Use fewer data workers or smaller batches, or ask for more memory."
        )
        return Verdict(tuple(guilty), "host out of memory", headline, sentence(text))
    if first.kind == "SIGKILL":
        headline = f"{who(guilty)} {_was(guilty)} killed by SIGKILL"
        text = f"{headline}{others}. {_FROM_OUTSIDE}"
        if "the kernel has killed nothing" not in first.message:
            text += " The kernel's out-of-memory killer does the same: `dmesg` tells."
        return Verdict(tuple(guilty), "killed", headline, sentence(text))
    if first.kind in _SIGNALS:
        cause, why = _SIGNALS[first.kind]
        headline = (
            f"{who(guilty)} crashed: {first.kind}" if cause == "crash" else f"{who(guilty)} {_was(guilty)} ended by {first.kind}"
        )
        said = f" {short(first.message.partition(chr(10))[2])}" if "\n" in first.message else ""
        return Verdict(tuple(guilty), cause, headline, sentence(f"{headline}{where}{others}. {why}{said}"))
    headline = f"{who(guilty)} {_was(guilty)} ended by {short(first.kind, 30)}"
    return Verdict(tuple(guilty), "killed", headline, sentence(f"{headline}{where}{others}. {_FROM_OUTSIDE}"))


def raised(evidence: Evidence, first: Failure, alike: list[int], waits: Mapping[int, tuple[Wait, str]]) -> Verdict:
    """Of one that failed first, and those that failed in the same way."""
    if first.kind.startswith("SIG"):
        return _signalled(evidence, first, [first], waits)
    kind = _kind(first)
    cause = kind.cause if kind is not None else "exception"
    named = _named(first, evidence.world_size) if first.ours else ()
    guilty = tuple(named or alike)
    rank = evidence.rank(first.rank)
    message = _message(first)
    verb = _verb(first)
    where = _where(first, rank)
    headline = f"{who(alike)} {verb}{where}"
    if named and named != tuple(alike):
        headline = f"{who(named)}: {message or verb}"
        text = f"{who(alike)} {verb}{where}, and it names {who(named)}: {message}"
    else:
        said = "" if first.kind in ("exit", "SystemExit") and re.fullmatch(r"exit code \d+", message) else message
        text = headline + while_others(evidence, alike, waits) + (f": {said}" if said else "")
    if cause == "exception" and first.kind in ("exit", "SystemExit"):
        cause = "exit"
    remedy = f" {kind.remedy}" if kind is not None and kind.remedy else ""
    text = text if text.endswith((".", "!", "?")) else f"{text}."
    return Verdict(guilty, cause, headline, sentence(f"{text}{remedy}"))


def _kind(failure: Failure) -> _Kind | None:
    if lost_data_worker(failure):
        return _DATA_WORKER
    said, raised_there = _said(failure)[:20_000], failure.message.startswith("Caught ")
    kinds = (kind for kind in _KINDS if not (raised_there and kind is _DATA_WORKER))
    return next((kind for kind in kinds if re.search(kind.pattern, said, re.DOTALL)), None)


def _message(failure: Failure) -> str:
    """On one line: an error of ours up to a traceback in it, else the first line, with what NCCL says of the reason below."""
    if failure.ours:
        lines = itertools.takewhile(lambda line: _HEAD not in line, failure.message[:20_000].splitlines())
        return short(" ".join(" ".join(lines).split())).removesuffix(":")
    if failure.message.startswith("Caught "):  # torch's loader again, with the traceback of its worker
        said = failure.message.strip().splitlines()
        return short(f"{said[-1].partition(': ')[2] or said[-1]} ({said[0].strip()})")
    last = _LAST_ERROR.search(failure.message[:20_000])
    return short(failure.message) + (f" Last error: {short(last[1])}" if last is not None else "")


def _verb(failure: Failure) -> str:
    if failure.kind == "exit":
        return f"ended with exit code {failure.exit_code} and without a word"
    if failure.kind == "SystemExit":
        return f"ended itself with exit code {failure.exit_code}"
    return f"raised {short(failure.kind, 80)}"


def _where(failure: Failure, rank: RankEvidence) -> str:
    """Where in the user's code; in what step, if its loop is ours."""
    frame = user_frame(of_traceback(failure.traceback))
    if frame is None and failure.user_frames:
        frame = user_frame(of_traceback("\n".join(f"  {line}" for line in failure.user_frames)))
    step = f", {rank.standing}" if rank.standing is not None and rank.is_known else ""
    return (f" at {frame}" if frame is not None else "") + step


_SPANS = r"\branks? ((?:\d{1,7}(?:-\d{1,7})?, ){0,1000}\d{1,7}(?:-\d{1,7})?)"
_SPAN, _MOST_NAMED = re.compile(r"\b(\d{1,7})-(\d{1,7})\b"), 1 << 20
_RANKS = re.compile(rf"{_SPANS}\b", re.IGNORECASE)
_SAID_BY_RANKS = re.compile(rf"{_SPANS}(?: \([^()]{{0,100}}\))?: ([^,;)\n]{{1,200}}?)(?=[,;)\n]|\. |\.?$)")


def _named(failure: Failure, world_size: int) -> tuple[int, ...]:
    """The ranks that an error of ours names: of "rank 0: 4, rank 1: 5, rank 2: 4" those that differ from most, else all.

    Without a value of each, only ranks of which the text speaks from its beginning: a remedy may name ranks, too.
    """
    text, found, said = failure.message[:20_000], set[int](), set[int]()
    compares = False
    if sum(max(0, min(int(b), world_size) - int(a)) for a, b in _SPAN.findall(text)) > _MOST_NAMED:
        return ()
    for line in text.splitlines():
        values: dict[str, set[int]] = {}
        for ranks, value in _SAID_BY_RANKS.findall(line):
            values.setdefault(value.strip(), set()).update(_spans(ranks, world_size))
        groups = sorted(values.values(), key=len)
        said |= set().union(*groups)
        if "the others: " in line:
            groups.append(set(range(world_size)))
        compares |= len(groups) > 1
        if len(groups) > 1 and len(groups[-1]) > len(groups[-2]):
            found |= set().union(*groups[:-1])
    if not compares:
        first = _RANKS.match(text)
        found = said or (_spans(first[1], world_size) if first is not None else set())
    return tuple(sorted(found))


def _spans(text: str, world_size: int) -> set[int]:
    """Of "0-2, 5"."""
    found = set[int]()
    for part in text.split(", "):
        first, _, last = part.partition("-")
        found |= set(range(int(first), min(int(last or first) + 1, world_size)))
    return found


def _was(ranks: Sequence[int]) -> str:
    return "was" if len(ranks) == 1 else "were"
