"""A rank that failed by itself: the meaning of its signal or error, and the remedy."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence

from echelon.diagnosis.evidence import Evidence, RankEvidence
from echelon.diagnosis.failure import Failure
from echelon.diagnosis.flight import Wait
from echelon.diagnosis.kinds import kind_of, kind_of_words
from echelon.diagnosis.lost_peers import error_before
from echelon.diagnosis.rank import is_check
from echelon.diagnosis.stacks import is_endless, logged_error, of_traceback, user_frame
from echelon.diagnosis.verdict import Verdict
from echelon.diagnosis.words import frames_of, place, sentence, short, while_others, who

__all__ = [
    "FROM_OUTSIDE",
    "own_failure",
    "raised",
    "summary",
]

_SAME_MOMENT_NS = 2_000_000_000


_SIGNALS: Mapping[str, tuple[str, str]] = {
    "SIGSEGV": ("crash", "C or C++ code used memory that is not its own: a bug in an extension or a driver, or faulty hardware."),
    "SIGBUS": ("crash", "Memory mapped from a file was not there: /dev/shm is full, or a file was cut short while it was read."),
    "SIGABRT": ("crash", "The process aborted itself after a failed check in C++; its log has more."),
    "SIGILL": ("crash", "It ran a binary that was built for another processor."),
    "SIGFPE": ("crash", "C or C++ code divided an integer by zero."),
    "SIGALRM": ("killed", "A timer that the program itself had set (signal.alarm, setitimer) ran out, and nothing handled it."),
    "SIGPIPE": ("killed", "It wrote to a pipe or socket without a reader, in code that does not handle that."),
    "SIGSYS": ("killed", "It made a system call that its container forbids (seccomp)."),
    "SIGXCPU": ("CPU limit", "It used up its limit of CPU time (ulimit -t)."),
    "SIGXFSZ": ("file too large", "A file exceeded the size limit (ulimit -f)."),
}
_CHAINED = re.compile(r"^(?:The above exception was the direct|During handling of the above)[^\n]*:\n\nTraceback ", re.MULTILINE)
_ENDS = (".", "!", "?")
_NEXT_SENTENCE, _NEXT_ITEM = re.compile(r"(?<![.!?:;,])\n(?=[A-Z])"), re.compile(r"(?<=[\w)])\n {2,}")
_HEAD = "Traceback (most recent call last)"
_LAST_ERROR = re.compile(r"^Last error:\s*(\S[^\n]{0,1000})", re.MULTILINE)
_UNLIKE_FIRST = re.compile(r"of the same param in process 0\b")
FROM_OUTSIDE = "The signal came from outside the run: from a user, the batch system or a machine that shuts down."


def own_failure(evidence: Evidence, waits: Mapping[int, tuple[Wait, str]]) -> Verdict | None:
    """The verdict on the rank that failed first by itself; None if no rank did.

    Ranks that failed in the same way at the same moment are guilty together: the program failed, not one rank.
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
            f"{who(guilty)} {_was(guilty)} killed by the kernel's out-of-memory killer{where}{others}. The memory of the "
            "machine, or the job's limit, was used up. Use fewer data workers or smaller batches, or ask for more memory."
        )
        return Verdict(tuple(guilty), "host out of memory", headline, sentence(text))
    if first.kind == "SIGKILL":
        headline = f"{who(guilty)} {_was(guilty)} killed by SIGKILL"
        text = f"{headline}{others}. {FROM_OUTSIDE}"
        if "the kernel has killed nothing" not in first.message:
            text += " The kernel's out-of-memory killer sends it, too: `dmesg` shows that."
        return Verdict(tuple(guilty), "killed", headline, sentence(text))
    if first.kind in _SIGNALS:
        cause, why = _SIGNALS[first.kind]
        headline = (
            f"{who(guilty)} crashed: {first.kind}" if cause == "crash" else f"{who(guilty)} {_was(guilty)} ended by {first.kind}"
        )
        words = first.message.partition("\n")[2]
        if words and (kind := kind_of_words(words)) is not None:
            cause, why = kind.cause, kind.remedy
        if first.kind == "SIGSEGV" and is_endless(rank.stack):
            why = "Its stack overflowed: these calls call one another without an end."
        ending = f": {summary(words).rstrip('.')}" if words else ""
        return Verdict(tuple(guilty), cause, headline, sentence(f"{headline}{where}{others}{ending}. {why}"))
    headline = f"{who(guilty)} {_was(guilty)} ended by {short(first.kind, 30)}"
    return Verdict(tuple(guilty), "killed", headline, sentence(f"{headline}{where}{others}. {FROM_OUTSIDE}"))


def raised(
    evidence: Evidence,
    first: Failure,
    alike: list[int],
    waits: Mapping[int, tuple[Wait, str]],
    *,
    then: str = "",
    why: str = "",
) -> Verdict:
    """The verdict on a rank that failed first, and on those that failed in the same way.

    Args:
        then: what these ranks did after the error, if they did not end.
        why: an explanation of that, added after the remedy.
    """
    if first.kind.startswith("SIG"):
        return _signalled(evidence, first, [first], waits)
    kind = kind_of(first)
    cause = kind.cause if kind is not None else "exception"
    named = _named(first, evidence.world_size) if first.ours else ()
    # Ranks that waited in vain are not to blame, and the absent ranks left no error.
    guilty = tuple(named or (() if cause == "ranks missing" else alike))
    rank = evidence.rank(first.rank)
    message = _message(first)
    verb = _verb(first, many=len(alike) > 1)
    where = _where(first, rank)
    headline = f"{who(alike)} {verb}{where}{then}"
    if named and named != tuple(alike):
        headline = f"{who(named)}: {message or verb}"
        text = f"{who(alike)} {verb}{where}, and it names {who(named)}: {message}"
    else:
        if first.kind in ("exit", "SystemExit") and re.fullmatch(r"exit code \d+", message):
            ends = f"its log ends with {rank.last_line!r}" if rank.last_line else ""
            message = f"its log tells of {rank.logged}" if rank.logged else ends
        text = headline + while_others(evidence, alike, waits) + (f": {message}" if message else "")
        text += _followed(first, text)
    if cause == "exception" and first.kind in ("exit", "SystemExit"):
        cause = "exit"
    remedy = " ".join(["", *([kind.remedy] if kind is not None and kind.remedy else []), *([why] if why else [])])
    if _UNLIKE_FIRST.search(first.message[:20_000]):
        guilty, which = _unlike_most(evidence, alike, waits)
        remedy = f" {which}{remedy}" if which else remedy
    text = text if text.endswith(_ENDS) else f"{text}."
    return Verdict(guilty, cause, headline, sentence(f"{text}{remedy}"))


def _followed(failure: Failure, error: str) -> str:
    """A sentence about the error that was being handled when this one was raised; empty without one, or if `error` has it."""
    is_chain = _CHAINED.search(failure.traceback) and _HEAD not in failure.message
    text = error_before(failure.traceback) if is_chain else ""
    before = logged_error(text)
    frame = user_frame(of_traceback(text))
    if not before or before in error or (failure.ours and frame is None):
        return ""
    kind, _, words = before.removesuffix(f" at {frame}").partition(": ")
    if words and short(words) in error:
        before = f"{kind} at {frame}" if frame is not None else kind
    return f"{'' if error.endswith(_ENDS) else '.'} It followed {before}"


def _unlike_most(
    evidence: Evidence, raised: Collection[int], waits: Mapping[int, tuple[Wait, str]]
) -> tuple[tuple[int, ...], str]:
    """Who is to blame when ranks found that they differ from rank 0. Ranks equal to rank 0 went on, perhaps to their end."""
    like_first = {0, *waits, *(number for number, rank in evidence.ranks.items() if rank.ended == 0)} - set(raised)
    if len(raised) > len(like_first):
        return tuple(sorted(like_first)), f"All of these differ from {who(like_first)}."
    if len(raised) < len(like_first):
        return tuple(sorted(raised)), ""
    return tuple(sorted({*raised, *like_first})), f"It differs from {who(like_first)}: nothing tells which of them is wrong."


def _message(failure: Failure) -> str:
    """The message on one line: of echelon's own errors up to a traceback, of others the first line and what belongs to it."""
    if failure.ours:
        lines = itertools.takewhile(lambda line: _HEAD not in line, failure.message[:20_000].splitlines())
        text = _NEXT_ITEM.sub("; ", _NEXT_SENTENCE.sub(". ", "\n".join(line.rstrip() for line in lines if line.strip())))
        return short(" ".join(text.split())).removesuffix(":")
    if failure.message.startswith("Caught "):  # torch's loader raises the error again, with the traceback of its worker
        rows = failure.message.strip().splitlines()
        return short(f"{rows[-1].partition(': ')[2] or rows[-1]} ({rows[0].strip()})")
    return summary(failure.message)


def summary(message: str) -> str:
    """The message's first line, the text that this line announces, and NCCL's last error below it."""
    last = _LAST_ERROR.search(message[:20_000])
    first, lines = short(message), message.strip().splitlines()
    if first.endswith(":") and len(lines) > 1:  # such as the output of another program
        first = f"{first} {short(lines[-1])}"
    return first + (f" Last error: {short(last[1])}" if last is not None else "")


def _verb(failure: Failure, *, many: bool) -> str:
    if failure.kind == "exit":
        return f"ended with exit code {failure.exit_code}" + ("" if failure.traceback else " and without an exception")
    if failure.kind == "SystemExit":
        return f"ended {'themselves' if many else 'itself'} with exit code {failure.exit_code}"
    return f"raised {short(failure.kind, 80)}"


def _where(failure: Failure, rank: RankEvidence) -> str:
    """Where in the user's code; and in which step, if the loop is echelon's."""
    frame = user_frame(frames_of(failure)) if failure.kind != "exit" else None
    if frame is None and failure.user_frames:
        frame = user_frame(of_traceback("\n".join(f"  {line}" for line in failure.user_frames)))
    step = f", {rank.standing}" if rank.standing is not None and rank.is_known else ""
    return (f" at {frame}" if frame is not None else "") + step


_SPANS = r"\branks? ((?:\d{1,7}(?:-\d{1,7})?, ){0,1000}\d{1,7}(?:-\d{1,7})?)"
_SPAN, _MOST_NAMED = re.compile(r"\b(\d{1,7})-(\d{1,7})\b"), 1 << 20
_RANKS = re.compile(rf"{_SPANS}\b", re.IGNORECASE)
_SAID_BY_RANKS = re.compile(rf"{_SPANS}(?: \([^()]{{0,100}}\))?: ([^,;)\n]{{1,200}}?)(?=[,;)\n]|\. |\.?$)")


def _named(failure: Failure, world_size: int) -> tuple[int, ...]:
    """The ranks that one of echelon's errors names. Of "rank 0: 4, rank 1: 5, rank 2: 4" those that differ from most, else all.

    Without a value for each rank, only ranks named at the beginning of the text: a remedy may name ranks, too.
    """
    text, minority, named = failure.message[:20_000], set[int](), set[int]()
    compares = False
    if sum(max(0, min(int(b), world_size) - int(a)) for a, b in _SPAN.findall(text)) > _MOST_NAMED:
        return ()
    for line in text.splitlines():
        values: dict[str, set[int]] = {}
        for ranks, value in _SAID_BY_RANKS.findall(line):
            values.setdefault(value.strip(), set()).update(_spans(ranks, world_size))
        groups = sorted(values.values(), key=len)
        named |= set().union(*groups)
        if "the others: " in line:
            groups.append(set(range(world_size)))
        compares |= len(groups) > 1
        if len(groups) > 1 and len(groups[-1]) > len(groups[-2]):
            minority |= set().union(*groups[:-1])
    if not compares:
        first = _RANKS.match(text)
        minority = named or (_spans(first[1], world_size) if first is not None else set())
    return tuple(sorted(minority))


def _spans(text: str, world_size: int) -> set[int]:
    """The ranks of "0-2, 5"."""
    ranks = set[int]()
    for part in text.split(", "):
        first, _, last = part.partition("-")
        ranks |= set(range(int(first), min(int(last or first) + 1, world_size)))
    return ranks


def _was(ranks: Sequence[int]) -> str:
    return "was" if len(ranks) == 1 else "were"
