"""Ranks that raised an exception and then waited for others, in `finally`, `except` or `__exit__`, where those never came.

Such a rank has not ended, so it has printed no traceback. An exception that is being handled is no fault by itself: a program may
train in an `except`. So it only explains why a rank is elsewhere than the others, if other rules found that it is, or found
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.diagnosis.evidence import Evidence, RankEvidence
from echelon.diagnosis.failed import raised
from echelon.diagnosis.failure import Failure
from echelon.diagnosis.flight import Wait
from echelon.diagnosis.stacks import WAITED_FOR, user_frame, waits_in
from echelon.diagnosis.verdict import Verdict
from echelon.diagnosis.words import frames_of, grouped, in_call, place, they_did

__all__ = ["handling", "was_handling"]

Waits = Mapping[int, tuple[Wait, str]]
_WHY = (
    "It made that call while handling its error, in `except`, `finally` or `__exit__`: let the error end the rank, and the "
    "others end with it."
)


def handling(evidence: Evidence, waits: Waits, verdict: Verdict) -> Verdict | None:
    """A verdict on the exception of ranks that `verdict` names, or between which it cannot decide. It replaces `verdict`."""
    errors = _of_some(evidence)
    named = [rank for rank in errors if rank in verdict.guilty]
    if not named and (verdict.guilty and not verdict.cause.startswith("mismatched")):
        return None
    guilty = named or sorted(errors)
    if not guilty:
        return None
    first = errors[guilty[0]]
    alike = [rank for rank in guilty if _key(errors[rank]) == _key(first)]
    call = _call(evidence.rank(guilty[0]), waits)
    then = f"waited in {call}" if call else f"stood{place(evidence.rank(guilty[0]))}"
    then = f"{',' if evidence.rank(guilty[0]).is_known else ''} and then {then}"
    return raised(evidence, first, alike, waits, then=then, why=_WHY if call else "")


def was_handling(evidence: Evidence, verdict: Verdict) -> list[str]:
    """Lines about exceptions of ranks that the verdict does not name, as further evidence; one line for ranks alike."""
    texts = {
        rank: f"was handling {failure.kind}{_at(failure)}"
        for rank, failure in _of_some(evidence).items()
        if evidence.rank(rank).failure is None and rank not in verdict.guilty
    }
    return [they_did(ranks, text) for ranks, text in grouped(texts)]


def _of_some(evidence: Evidence) -> dict[int, Failure]:
    """The exceptions in handling, unless all ranks handle the same one, as where all train in an `except`."""
    errors = {number: rank.raised for number, rank in sorted(evidence.ranks.items()) if rank.raised is not None}
    is_common = len(errors) == evidence.world_size and len({_key(failure) for failure in errors.values()}) == 1
    return {} if is_common and evidence.world_size > 1 else errors


def _key(failure: Failure) -> tuple[str, str]:
    return failure.kind, _at(failure)


def _at(failure: Failure) -> str:
    frame = user_frame(frames_of(failure))
    return f" at {frame}" if frame is not None else ""


def _call(rank: RankEvidence, waits: Waits) -> str:
    if rank.rank in waits:
        wait, call = waits[rank.rank]
        own = rank.flight.get(wait.group) if rank.flight is not None else None
        own_call = own.calls.get(wait.call.seq) if own is not None else None
        return call if own_call is None or own_call.op == wait.call.op else in_call(own_call, wait.group)
    name = waits_in(rank.stack)
    return "" if name in WAITED_FOR else name
