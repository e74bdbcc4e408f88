"""Ranks that waited for one another: for whom, and why that one did not come."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from echelon.contracts.pulse import Phase
from echelon.launcher.explain.evidence import Evidence, RankEvidence
from echelon.launcher.explain.failed import raised
from echelon.launcher.explain.flight import Wait
from echelon.launcher.explain.stacks import waits_in
from echelon.launcher.explain.verdict import Verdict
from echelon.launcher.explain.words import (
    doing,
    grouped,
    is_check,
    place,
    ranks_are,
    sentence,
    stack_of,
    together,
    while_others,
    who,
)
from echelon.launcher.job import Failure

__all__ = [
    "barrier",
    "behind",
    "deadlock",
    "everybody",
    "left_early",
    "missing",
    "not_waiting",
    "stopped",
]

_NOT_PASSED = re.compile(r"Ranks? (\d{1,7}(?:, ?\d{1,7}){0,1000}) failed to pass monitoredBarrier")
Waits = Mapping[int, tuple[Wait, str]]


def stopped(evidence: Evidence, waits: Waits) -> Verdict | None:
    """A process that exists and does not run."""
    guilty = [number for number, rank in sorted(evidence.ranks.items()) if rank.stopped and rank.failure is None]
    if not guilty:
        return None
    silent = [rank.silent_s for rank in map(evidence.rank, guilty) if rank.silent_s is not None]
    since = f" (no heartbeat for {max(silent):.0f} s)" if silent else ""
    first = evidence.rank(guilty[0])
    at = f", {first.standing}" if first.standing is not None and first.is_known else ""
    headline = f"{who(guilty)} stopped{since}{at}{place(first)}"
    others = while_others(evidence, guilty, waits)
    text = f"{headline}{others}. The process was there and did not run, as after SIGSTOP or under a debugger."
    return Verdict(tuple(guilty), "stopped", headline, sentence(text))


def left_early(evidence: Evidence, waits: Waits) -> Verdict | None:
    """A rank that ended well while others went on to something for which they need it."""
    guilty = [number for number, rank in sorted(evidence.ranks.items()) if rank.ended == 0]
    if not guilty or len(guilty) == evidence.world_size:
        return None
    needed = set().union(*(set(wait.missing) | set(wait.unknown) for wait, _ in waits.values())) if waits else set(guilty)
    needed_ones = [rank for rank in guilty if rank in needed]
    if not needed_ones:
        return None
    headline = f"{who(needed_ones)} left with exit code 0 before the others"
    text = f"{headline}{_fewer(evidence, needed_ones, waits)}{while_others(evidence, guilty, waits)}."
    why = " Every rank must make the same number of steps: see loaders of different lengths, and returns under a condition."
    return Verdict(tuple(needed_ones), "left early", headline, sentence(text + why))


def _fewer(evidence: Evidence, guilty: Collection[int], waits: Waits) -> str:
    """As " after 9 steps where others made 10", or how many collectives it has called fewer."""
    steps = {rank: r.standing.step for rank, r in evidence.ranks.items() if r.standing is not None and r.standing.step}
    mine, others = [steps.get(rank, 0) for rank in guilty], [n for rank, n in steps.items() if rank not in guilty]
    if others and all(mine) and max(mine) < max(others):
        return f", after {max(mine)} steps where others had made {max(others)},"
    flights = evidence.flights
    for wait, _ in waits.values():
        last = [flights[rank][wait.group].last for rank in guilty if rank in flights and wait.group in flights[rank]]
        if last and max(last) < wait.call.seq:
            return f", after {max(last)} of its collectives"
    return ""


def missing(evidence: Evidence, waits: Waits) -> Verdict | None:
    """The ranks for which others wait in a collective, and which wait for nobody themselves."""
    waiting = {rank for rank, (wait, _) in waits.items() if wait.missing or wait.unknown or not wait.complete}
    wanted = {rank for wait, _ in waits.values() for rank in wait.missing}
    guilty = sorted(wanted - waiting)
    if not guilty:
        unknown = sorted({rank for wait, _ in waits.values() for rank in wait.unknown} - waiting)
        unknown = [rank for rank in unknown if not evidence.rank(rank).unread and not _refused(evidence.rank(rank))]
        # A record of everybody else, and none of these: they could not even answer.
        if not unknown or wanted or len(unknown) > len(evidence.flights):
            return None
        guilty = unknown
    # Messages from rank to rank are in no record of gloo's: who waits for one is no root, if there is another.
    guilty = [rank for rank in guilty if not _waits_for_others(evidence.rank(rank))] or guilty
    failures = [f for rank in guilty if (f := evidence.rank(rank).failure) is not None and not f.kind.startswith("SIG")]
    # By their words they lost a peer, and yet nobody else is to blame. But NCCL's watchdog aborts the absent with the others.
    if len(failures) == len(guilty):
        return raised(evidence, Failure.first(failures), guilty, waits)
    call = next(call for wait, call in waits.values() if set(guilty) & (set(wait.missing) | set(wait.unknown)))
    rank = evidence.rank(guilty[0])
    headline = f"{who(guilty)} did not come to {call}"
    here = [rank for rank, (_, other) in waits.items() if other == call and rank not in guilty]
    others = f", in which {who(here)} waited" if len(here) + len(guilty) == evidence.world_size else ""
    others = others or while_others(evidence, guilty, waits)
    text = f"{headline}{others}. {_stood(evidence, guilty)}{_fewer_steps(evidence, guilty)}"
    return Verdict(tuple(guilty), _kind_of_absence(rank), headline, sentence(text.strip()))


def _refused(rank: RankEvidence) -> bool:
    return rank.failure is not None and is_check(rank.failure)


def _waits_for_others(rank: RankEvidence) -> bool:
    name = waits_in(stack_of(rank))
    return bool(name) and name != "a DataLoader"


def _stood(evidence: Evidence, guilty: Collection[int]) -> str:
    """Where the missing ranks were, a sentence each for those alike."""
    texts = {}
    for number in guilty:
        rank = evidence.rank(number)
        at, where = f" {rank.standing}" if rank.is_known else "", place(rank)
        texts[number] = f"was{at}{where}" if at or where else "left no stack: code in C may have kept it from answering"
    return " ".join(f"{sentence(ranks_are(ranks, text, text.replace('was', 'were', 1)))}." for ranks, text in grouped(texts)[:3])


def _fewer_steps(evidence: Evidence, guilty: Collection[int]) -> str:
    steps = {rank: r.standing.step for rank, r in evidence.ranks.items() if r.standing is not None and r.is_known}
    mine, others = {steps[rank] for rank in guilty if rank in steps}, {n for rank, n in steps.items() if rank not in guilty}
    if len(mine) != 1 or not others or max(others) <= min(mine):
        return ""
    fewer = max(others) - min(mine)
    return f" It had completed {min(mine)} steps, {fewer} fewer than others."


def _kind_of_absence(rank: RankEvidence) -> str:
    phase = rank.standing.phase if rank.standing is not None else Phase.NONE
    if phase in (Phase.DATA, Phase.EVAL_DATA) or waits_in(rank.stack) == "a DataLoader":
        return "slow data"
    return "slow checkpoint" if phase is Phase.CHECKPOINT else "did not come"


def barrier(evidence: Evidence, waits: Waits) -> Verdict | None:
    """The ranks that did not come to a barrier which says so, as it does under `--check-collectives`."""
    texts = [f.message[:2000] for f in evidence.failures]
    named = {int(rank) for text in texts for ranks in _NOT_PASSED.findall(text) for rank in ranks.split(",")}
    guilty = sorted(rank for rank in named if rank < evidence.world_size and evidence.rank(rank).failure is None)
    if not guilty:
        return None
    headline = f"{who(guilty)} did not come to a collective"
    text = f"{headline}{while_others(evidence, guilty, waits)}. {_stood(evidence, guilty)}{_fewer_steps(evidence, guilty)}"
    return Verdict(tuple(guilty), _kind_of_absence(evidence.rank(guilty[0])), headline, sentence(text))


def deadlock(evidence: Evidence, waits: Waits) -> Verdict | None:
    """Ranks that wait for one another, in collectives of different groups."""
    waiting = {rank: (wait, call) for rank, (wait, call) in waits.items() if wait.missing}
    wanted = {rank for wait, _ in waiting.values() for rank in wait.missing}
    if not wanted or not wanted <= waiting.keys():
        return None
    parts = [
        f"{who(ranks)} waited in {text}"
        for ranks, text in grouped({r: f"{call} for {who(wait.missing)}" for r, (wait, call) in waiting.items()})[:4]
    ]
    by_call: dict[str, list[int]] = {}
    for rank, (_, call) in waiting.items():
        by_call.setdefault(call, []).append(rank)
    most = max(by_call.values(), key=len)
    guilty = wanted - set(most) if 2 * len(most) > len(waiting) else wanted
    headline = f"{who(wanted)} waited for one another"
    text = f"{headline}: {together(parts)}. Ranks that are in several groups must make their calls in one order on all of them."
    return Verdict(tuple(sorted(guilty)), "mismatched order", headline, sentence(text))


def not_waiting(evidence: Evidence, waits: Waits) -> Verdict | None:
    """By the stacks alone: the only rank that does not wait for others where all else do."""
    waiting, free = [], []
    for number in evidence.all_ranks:
        rank = evidence.rank(number)
        stack = stack_of(rank)
        name = waits_in(stack)
        if number in waits or (name and name != "a DataLoader") or (rank.failure is not None and rank.failure.waited):
            waiting.append(number)
        elif stack or rank.where:
            free.append(number)
    if len(free) != 1 or len(waiting) != evidence.world_size - 1 or not waiting:
        return None
    rank = evidence.rank(free[0])
    headline = f"{who(free)} did not come, and stood{place(rank)}" if place(rank) else f"{who(free)} did not come"
    text = f"{headline}{while_others(evidence, free, waits)}."
    return Verdict(tuple(free), _kind_of_absence(rank), headline, sentence(text + _fewer_steps(evidence, free)))


def behind(evidence: Evidence, waits: Waits) -> Verdict | None:
    """By the positions alone: the ranks that have not come as far as the others."""
    ranks = [evidence.rank(number) for number in evidence.all_ranks]
    if not ranks or any(r.standing is None or r.standing.phase is Phase.NONE for r in ranks):
        return None
    at = {r.rank: (r.standing.step, r.standing.phase, r.standing.evaluated) for r in ranks if r.standing is not None}
    least = min(at.values())
    guilty = [rank for rank, position in at.items() if position == least]
    if max(at.values()) == least or any((f := evidence.rank(rank).failure) is not None and f.waited for rank in guilty):
        return None
    rank = evidence.rank(guilty[0])
    headline = f"{who(guilty)} {'was' if len(guilty) == 1 else 'were'} behind the others"
    text = f"{headline}: {_stood(evidence, guilty)}{_fewer_steps(evidence, guilty)}"
    if others := while_others(evidence, guilty, waits):
        text = f"{headline}{others}. {_stood(evidence, guilty)}{_fewer_steps(evidence, guilty)}"
    return Verdict(tuple(guilty), _kind_of_absence(rank), headline, sentence(text))


def everybody(evidence: Evidence, waits: Waits) -> tuple[str, ...]:
    """What each rank did, a line for those alike."""
    texts = {number: doing(rank, waits) + (place(rank) if number in waits else "") for number, rank in evidence.ranks.items()}
    return tuple(f"{who(ranks)} {text}" for ranks, text in grouped(texts))
