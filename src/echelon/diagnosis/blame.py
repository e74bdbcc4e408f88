"""Which failure is shown first: the one that the others follow from.

The launcher knows which rank failed first. If that rank only waited for another, the failure of the awaited rank is shown
instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echelon.diagnosis.evidence import Evidence
from echelon.diagnosis.failure import HANGS, Failure
from echelon.diagnosis.rank import is_check
from echelon.diagnosis.verdict import Verdict

__all__ = ["blamed"]


def blamed(evidence: Evidence, verdict: Verdict, first: Failure, failures: Sequence[Failure]) -> Failure:
    """The failure of a rank that the verdict names, if it does not name the rank that failed first."""
    refused = is_check(first) and first.rank not in verdict.guilty  # another rank may have given the collective wrong tensors
    only_waited = first.is_victim or first.kind == HANGS or refused
    if not verdict.guilty or not only_waited:
        if first.kind == HANGS:
            return replace(first, message="\n".join([verdict.paragraph, *verdict.seen]))
        if only_waited and first.waited:
            headline = first.headline or f"rank {first.rank} gave up waiting for the others"
            return replace(first, message=f"{first.message}\n({verdict.paragraph})", headline=headline)
        return first
    rank = verdict.guilty[0]
    own = next((f for f in failures if f.rank == rank and not f.is_victim and f.kind != HANGS), None)
    if own is not None:
        return own
    other = next((f for f in failures if f.waited), first)
    lines = [verdict.paragraph]
    if other.kind == HANGS:
        lines += verdict.seen
    else:
        lines += [f"rank {other.rank} {'waited and gave up' if other.waited else 'then failed'}:", *other.user_frames[-1:]]
        lines += [f"{other.kind}: {other.message}"]
    kind = "stopped" if verdict.cause == "stopped" else "behind"
    raised = evidence.rank(rank).raised if kind == "behind" else None
    frames = raised.user_frames if raised is not None else ()
    log = first.log.with_name(f"rank{rank}.log") if first.log is not None else None
    return Failure(rank, first.exit_code, first.time_ns, kind, "\n".join(lines), frames, log=log, headline=verdict.headline)
