"""The record of how an attempt ended, with who is to blame for it: the words and the verdict are those of `launcher.explain`.

The launcher knows which rank failed first. If that one only waited for another, the one that it waited for is named in its place.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE
from echelon.launcher.explain import Evidence, Verdict, explain
from echelon.launcher.explain.rank import is_check
from echelon.launcher.job import Failure
from echelon.launcher.local.attempt import write_exit
from echelon.launcher.local.rank_state import RankState

__all__ = ["HANGS", "HUNG", "record_end"]

logger = logging.getLogger(__name__)

HUNG = 124  # the exit code, as `timeout` has it
HANGS = "hang"  # the kind of a failure that only says that nothing moved


def record_end(
    here: RunDir,
    code: int,
    failures: Sequence[Failure] = (),
    stopped: str | None = None,
    *,
    seen: Mapping[int, RankState | Mapping[str, Any]] | None = None,
    hang_s: float | None = None,
    world_size: int | None = None,
) -> Failure | None:
    """Write an attempt's exit.json, as `write_exit` does, and return the failure from which the others follow.

    Args:
        code: if no rank failed.
        failures: of all ranks that failed.
        seen: how far each rank had come before the ranks were ended; of other nodes as their records say it.
    """
    first = Failure.first(failures) if failures else None

    write = functools.partial(write_exit, here.exit_json, stopped=stopped, seen=seen, hang_s=hang_s, world_size=world_size)
    write(first.exit_code if first else code, failures, first)
    if first is None and stopped is None and code != REQUEUE:
        return None
    try:
        evidence = Evidence.of(here.path, here.attempt)
        verdict = explain(evidence)
    except Exception:  # whatever the folder holds: the end of a run does not depend on its explanation
        logger.debug("the end of attempt %d cannot be explained", here.attempt, exc_info=True)
        return first
    if first is None:
        if stopped is not None or verdict.guilty:
            write(code, failures, explained=verdict.paragraph)
        return None
    named = _named(first, failures, verdict)
    if named.kind == "behind" and (raised := evidence.rank(named.rank).raised) is not None:
        named = replace(named, user_frames=raised.user_frames)
    all_failed = [*failures, *([named] if all(f.rank != named.rank for f in failures) else [])]
    write(named.exit_code, all_failed, named, explained=verdict.paragraph)
    return named


def _named(first: Failure, failures: Sequence[Failure], verdict: Verdict) -> Failure:
    """The failure of a rank that the verdict names, if it does not name the first."""
    refused = is_check(first) and first.rank not in verdict.guilty  # what another gave the collective
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
    said = [verdict.paragraph]
    if other.kind == HANGS:
        said += verdict.seen
    else:
        said += [f"rank {other.rank} {'waited and gave up' if other.waited else 'then failed'}:", *other.user_frames[-1:]]
        said += [f"{other.kind}: {other.message}"]
    kind = "stopped" if verdict.cause == "stopped" else "behind"
    log = first.log.with_name(f"rank{rank}.log") if first.log is not None else None
    return Failure(rank, first.exit_code, first.time_ns, kind, "\n".join(said), log=log, headline=verdict.headline)
