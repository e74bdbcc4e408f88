"""Ranks that waited for one another: whom they waited for, and why that rank did not come."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from echelon.contracts.pulse import Phase, RankProgress
from echelon.diagnosis.evidence import Evidence, RankEvidence
from echelon.diagnosis.failed import raised
from echelon.diagnosis.failure import Failure
from echelon.diagnosis.flight import ROOTED, Wait, expected
from echelon.diagnosis.rank import is_check
from echelon.diagnosis.stacks import waits_in
from echelon.diagnosis.verdict import Verdict
from echelon.diagnosis.words import (
    doing,
    grouped,
    in_call,
    place,
    sentence,
    stack_of,
    they_did,
    together,
    while_others,
    who,
)

__all__ = [
    "all_in_call",
    "barrier",
    "behind",
    "deadlock",
    "everybody",
    "left_early",
    "missing",
    "not_waiting",
    "receiving",
    "stopped",
]

_NOT_PASSED = re.compile(r"Ranks? (\d{1,7}(?:, ?\d{1,7}){0,1000}) failed to pass monitoredBarrier")
# Arguments that must be alike on all ranks, and that no flight record holds.
_UNRECORDED = (
    (re.compile("all_?to_?all"), "the sizes of what each sends to each"),
    (ROOTED, "the roots, `src` or `dst`,"),
)
_MOST_THREADS = 3
_NOT_TOLD = ("init_device_mesh", "monitored_barrier", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group")
_RECEIVES = ("recv", "recv_object_list")
_SEND = "The loader waits for that batch forever: return only objects that can be pickled, such as tensors, numbers and text."
Waits = Mapping[int, tuple[Wait, str]]


def stopped(evidence: Evidence, waits: Waits) -> Verdict | None:
    """A process that exists but does not run."""
    guilty = [number for number, rank in sorted(evidence.ranks.items()) if rank.stopped and rank.failure is None]
    if not guilty:
        return None
    silent = [rank.silent_s for rank in map(evidence.rank, guilty) if rank.silent_s is not None]
    since = f" (no heartbeat for {max(silent):.0f} s)" if silent else ""
    first = evidence.rank(guilty[0])
    at = f", {first.standing}" if first.standing is not None and first.is_known else ""
    headline = f"{who(guilty)} stopped{since}{at}{place(first)}"
    others = while_others(evidence, guilty, waits)
    text = f"{headline}{others}. The process exists but did not run, as after SIGSTOP or under a debugger."
    return Verdict(tuple(guilty), "stopped", headline, sentence(text))


def left_early(evidence: Evidence, waits: Waits) -> Verdict | None:
    """A rank that ended well although the others still need it in a call."""
    guilty = [number for number, rank in sorted(evidence.ranks.items()) if rank.ended == 0]
    if not guilty or len(guilty) == evidence.world_size:
        return None
    needed = set().union(*(set(wait.missing) | set(wait.unknown) for wait, _ in waits.values())) if waits else set(guilty)
    needed_ones = [rank for rank in guilty if rank in needed]
    if not needed_ones:
        return None
    if (more := _one_more(evidence, needed_ones, waits)) is not None:
        return more
    headline = f"{who(needed_ones)} left with exit code 0 before the others"
    text = f"{headline}{_fewer(evidence, needed_ones, waits)}{while_others(evidence, guilty, waits)}."
    why = " Every rank must make the same number of steps: check for loaders of different lengths, and for conditional returns."
    return Verdict(tuple(needed_ones), "left early", headline, sentence(text + why))


def _one_more(evidence: Evidence, left: Sequence[int], waits: Waits) -> Verdict | None:
    """The case that all other ranks left after equally many calls: the one that waits may have made a call too many.

    Among more than two ranks, the one that waits is the odd one. Of two, nothing tells which is wrong if the one that left had
    finished its program, unless the earlier calls show that this call was due.
    """
    waiting = sorted(rank for rank, (wait, _) in waits.items() if set(wait.missing) & set(left))
    if len(waiting) != 1 or len(left) != evidence.world_size - 1:
        return None
    [rank], wait = waiting, waits[waiting[0]][0]
    standing = {r.standing.position[:2] for number in (rank, *left) if (r := evidence.rank(number)).standing is not None}
    trace = evidence.flights[rank].get(wait.group) if rank in evidence.flights else None
    others = {evidence.flights[number][wait.group].last for number in left if wait.group in evidence.flights.get(number, {})}
    if len(standing) > 1 or trace is None or others != {wait.call.seq - 1}:
        return None
    due = expected(trace, wait.call.seq)
    if len(left) == 1 and (not evidence.rank(left[0]).finished or due is None or due[0] == wait.call.key):
        return None
    call = in_call(wait.call, wait.group)
    headline = f"{who([rank])} called {call}{place(evidence.rank(rank))}, and {who(left)} had left with exit code 0"
    how = f", after {wait.call.seq - 1} collectives, like all others"
    why = " It made a call too many, such as one that only this rank reaches."
    if len(left) == 1:
        how, why = "", " Either this is a call too many, or the other rank left too early: nothing tells which."
    text = f"{headline}{how}.{why} All ranks of a group must make the same calls."
    return Verdict((rank,) if len(left) > 1 else (*sorted((rank, *left)),), "left early", headline, sentence(text))


def _fewer(evidence: Evidence, guilty: Collection[int], waits: Waits) -> str:
    """As ", in update 9 where others were in update 10,", or the number of collectives after which they left."""
    known = {rank: r.standing for rank, r in evidence.ranks.items() if r.standing is not None and r.standing.step}
    counts = [known[rank] for rank in guilty if rank in known]
    others = [standing for rank, standing in known.items() if rank not in guilty]
    if others and len(counts) == len(guilty):
        at, ahead = max(counts, key=_position), max(others, key=_position)
        if at.step < ahead.step:
            return f", {at} where others were {ahead},"
    flights = evidence.flights
    for wait, _ in waits.values():
        last = [flights[rank][wait.group].last for rank in guilty if rank in flights and wait.group in flights[rank]]
        if last and max(last) < wait.call.seq:
            return f", after {max(last)} collectives,"
    return ""


def _position(standing: RankProgress) -> tuple[int, int, int, int, int]:
    return standing.position


def missing(evidence: Evidence, waits: Waits) -> Verdict | None:
    """The ranks for which others wait in a collective, and which do not wait for anyone themselves."""
    waiting = {rank for rank, (wait, _) in waits.items() if wait.missing or wait.unknown or not wait.complete}
    wanted = {rank for wait, _ in waits.values() for rank in wait.missing}
    guilty = sorted(wanted - waiting)
    if not guilty:
        unknown = sorted({rank for wait, _ in waits.values() for rank in wait.unknown} - waiting)
        unknown = [rank for rank in unknown if not evidence.rank(rank).flight_unreadable and not _refused(evidence.rank(rank))]
        # All other ranks have a record and these have none: they could not even answer.
        if not unknown or wanted or len(unknown) > len(evidence.flights):
            return None
        guilty = unknown
    # Gloo records no point-to-point messages: a rank that waits for one is not the root cause if another rank is free.
    guilty = [rank for rank in guilty if not _waits_for_others(evidence.rank(rank))] or guilty
    failures = [f for rank in guilty if (f := evidence.rank(rank).failure) is not None and not f.kind.startswith("SIG")]
    # Their own errors say that they lost a peer, yet no other rank is to blame. NCCL's watchdog, however, aborts absent ranks,
    # too.
    lone = all(_untold(evidence.rank(rank)) for rank in guilty)
    if len(failures) == len(guilty) and not lone:
        return raised(evidence, Failure.first(failures), guilty, waits)
    call = next(call for wait, call in waits.values() if set(guilty) & (set(wait.missing) | set(wait.unknown)))
    rank = evidence.rank(guilty[0])
    headline = f"{who(guilty)} did not come to {call}"
    stuck = [rank for rank, (_, other) in waits.items() if other == call and rank not in guilty]
    others = f", in which {who(stuck)} waited" if len(stuck) + len(guilty) == evidence.world_size else ""
    others = others or while_others(evidence, guilty, waits)
    text = f"{headline}{others}. {_stood(evidence, guilty)}{_fewer_steps(evidence, guilty)}"
    if lone:
        return Verdict(tuple(guilty), "mismatched order", headline, sentence(f"{text} All ranks must make that call, or none."))
    return Verdict(tuple(guilty), _kind_of_absence(rank), headline, sentence(text.strip()))


def all_in_call(evidence: Evidence, waits: Waits) -> Verdict | None:
    """Ranks that wait in a call that all have reached, and that some may have left: they wait for one another in it.

    Then an argument that no record holds, such as the root, differs between ranks; or the network between them is broken.
    """
    stuck = {rank: wait for rank, (wait, _) in waits.items() if not wait.missing and not wait.unknown and wait.complete}
    wanted = {rank for wait, _ in waits.values() for rank in wait.missing}
    if len(stuck) < 2 or not wanted <= set(stuck) or any(not waits_in(stack_of(evidence.rank(rank))) for rank in stuck):
        return None
    calls = {(wait.group, wait.call.seq) for wait in stuck.values()}
    free = set(evidence.all_ranks) - set(waits)
    if len(calls) > 1 or free:
        return None
    failures = [failure for rank in stuck if (failure := evidence.rank(rank).failure) is not None]
    if evidence.hang_after_s is None and not any(failure.waited for failure in failures):
        return None
    wait = next(iter(stuck.values()))
    differs = next((what for op, what in _UNRECORDED if op.search(wait.call.op)), "")
    why = f"Most often {differs} differ between ranks; no record holds them. Otherwise" if differs else "Then"
    headline = f"{who(stuck)} waited for one another in {in_call(wait.call, wait.group)}, to which all ranks had come"
    text = f"{headline}{place(evidence.rank(min(stuck)))}{while_others(evidence, stuck, waits)}."
    text = f"{text} {why} the network between the ranks may be broken: `echelon doctor` tests it."
    return Verdict(tuple(sorted(stuck)), "mismatched arguments" if differs else "did not end", headline, sentence(text))


def _refused(rank: RankEvidence) -> bool:
    return rank.failure is not None and is_check(rank.failure)


def _waits_for_others(rank: RankEvidence) -> bool:
    name = waits_in(stack_of(rank))
    return bool(name) and name != "a DataLoader"


def _stood(evidence: Evidence, guilty: Collection[int]) -> str:
    """Where the missing ranks were: a sentence for each group alike."""
    texts = {}
    for number in guilty:
        rank = evidence.rank(number)
        at, where = f" {rank.standing}" if rank.is_known else "", place(rank)
        at = f"{at}{',' if at else ''} in {name}" if (name := _untold(rank)) else at
        texts[number] = f"was{at}{where}" if at or where else "left no stack: C code may have kept it from answering"
    sentences = [f"{sentence(they_did(ranks, text))}." for ranks, text in grouped(texts)[:3]]
    return " ".join([*sentences, *_other_threads(evidence, guilty), *_lost_threads(evidence, guilty)])


def _other_threads(evidence: Evidence, guilty: Collection[int]) -> list[str]:
    """Sentences about the other threads of ranks that stand in code of their own: one of these may hold up the rank."""
    own = [rank for rank in map(evidence.rank, guilty) if rank.stack and not waits_in(rank.stack)]
    texts = {rank.rank: together([str(frame) for frame in rank.threads[:_MOST_THREADS]]) for rank in own if rank.threads}
    return [f"Other threads of {who(ranks)} stood at {text}." for ranks, text in grouped(texts)[:3]]


def _untold(rank: RankEvidence) -> str:
    """The call in which the rank waits for all others, if no record holds such calls."""
    name = waits_in(stack_of(rank))
    return name if name in _NOT_TOLD else ""


def _lost_threads(evidence: Evidence, guilty: Collection[int]) -> list[str]:
    """Sentences about ended threads and failed data workers, for which a rank may still wait."""
    threads = grouped({number: evidence.rank(number).thread for number in guilty})
    loader_errors = grouped({number: evidence.rank(number).loader_error for number in guilty})
    return [
        *(f"A thread of {who(ranks)} had ended with {text}." for ranks, text in threads[:3]),
        *(
            f"A data worker of {who(ranks)} could not send a batch: {text.rstrip('.')}. {_SEND}"
            for ranks, text in loader_errors[:3]
        ),
    ]


def _fewer_steps(evidence: Evidence, guilty: Collection[int]) -> str:
    steps = {rank: r.standing.step for rank, r in evidence.ranks.items() if r.standing is not None and r.is_known}
    steps_of_guilty, others = (
        {steps[rank] for rank in guilty if rank in steps},
        {n for rank, n in steps.items() if rank not in guilty},
    )
    if len(steps_of_guilty) != 1 or not others or max(others) <= min(steps_of_guilty):
        return ""
    # Not a count of completed updates: in a loop of one's own an update lasts until the next batch is asked for.
    fewer = max(others) - min(steps_of_guilty)
    return f" {'It was' if len(guilty) == 1 else 'They were'} {fewer} {'update' if fewer == 1 else 'updates'} behind the others."


def _kind_of_absence(rank: RankEvidence) -> str:
    if rank.loader_error:
        return "data worker"
    phase = rank.standing.phase if rank.standing is not None else Phase.NONE
    if phase in (Phase.DATA, Phase.EVAL_DATA) or waits_in(rank.stack) == "a DataLoader":
        return "slow data"
    return "slow checkpoint" if phase is Phase.CHECKPOINT else "did not come"


def barrier(evidence: Evidence, waits: Waits) -> Verdict | None:
    """The ranks that did not reach a barrier, as the barrier itself reports under `--check-collectives`."""
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
    text = f"{headline}: {together(parts)}. Ranks that share several groups must make their calls in the same order."
    return Verdict(tuple(sorted(guilty)), "mismatched order", headline, sentence(text))


def receiving(evidence: Evidence, waits: Waits) -> Verdict | None:
    """Ranks that all wait for a message, so that none sends one."""
    receivers = [rank for rank in map(evidence.rank, evidence.all_ranks) if waits_in(stack_of(rank)) in _RECEIVES]
    if len(receivers) != evidence.world_size or len(receivers) < 2:
        return None
    headline = f"{who(evidence.all_ranks)} all waited to receive"
    text = f"{headline}{place(receivers[0])}, and none of them sends. Of two ranks one must send before it receives: "
    text += "order the calls by rank, or give both to batch_isend_irecv."
    return Verdict((*evidence.all_ranks,), "mismatched order", headline, sentence(text))


def not_waiting(evidence: Evidence, waits: Waits) -> Verdict | None:
    """By the stacks alone: the only rank that does not wait for others while all the others do."""
    waiting, free = [], []
    for number in evidence.all_ranks:
        rank = evidence.rank(number)
        stack = stack_of(rank)
        name = waits_in(stack)
        if number in waits or (name and name != "a DataLoader") or (rank.failure is not None and rank.failure.waited):
            waiting.append(number)
        elif stack or rank.where:
            free.append(number)
    if len(free) != 1 or len(waiting) != evidence.world_size - 1 or not waiting or _refused(evidence.rank(free[0])):
        return None
    rank = evidence.rank(free[0])
    headline = f"{who(free)} did not come, and stood{place(rank)}" if place(rank) else f"{who(free)} did not come"
    text = " ".join([f"{headline}{while_others(evidence, free, waits)}.", *_lost_threads(evidence, free)])
    return Verdict(tuple(free), _kind_of_absence(rank), headline, sentence(text + _fewer_steps(evidence, free)))


def behind(evidence: Evidence, waits: Waits) -> Verdict | None:
    """By the positions alone: the ranks that are behind the others."""
    ranks = [evidence.rank(number) for number in evidence.all_ranks]
    if not ranks or any(r.standing is None or r.standing.phase is Phase.NONE for r in ranks):
        return None
    at = {r.rank: r.standing.position for r in ranks if r.standing is not None}
    least = min(at.values())
    guilty = [rank for rank, position in at.items() if position == least]
    is_one_step = len({step for step, *_ in at.values()}) == 1
    if any(map(_refused, ranks)) and (is_one_step or 2 * len(guilty) >= len(ranks)):
        return None  # ambiguous: the rank behind or the one ahead may have taken another way
    if max(at.values()) == least or any((f := evidence.rank(rank).failure) is not None and f.waited for rank in guilty):
        return None
    rank = evidence.rank(guilty[0])
    headline = f"{who(guilty)} {'was' if len(guilty) == 1 else 'were'} behind the others"
    text = f"{headline}: {_stood(evidence, guilty)}{_fewer_steps(evidence, guilty)}"
    if others := while_others(evidence, guilty, waits):
        text = f"{headline}{others}. {_stood(evidence, guilty)}{_fewer_steps(evidence, guilty)}"
    return Verdict(tuple(guilty), _kind_of_absence(rank), headline, sentence(text))


def everybody(evidence: Evidence, waits: Waits) -> tuple[str, ...]:
    """What each rank did: one line for ranks alike."""
    texts = {number: doing(rank, waits) + (place(rank) if number in waits else "") for number, rank in evidence.ranks.items()}
    return tuple(they_did(ranks, text) for ranks, text in grouped(texts))
