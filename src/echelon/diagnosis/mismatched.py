"""Ranks that called different collectives, by their flight records, by torch's own check, or by a rank's earlier calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from echelon.diagnosis.evidence import Evidence
from echelon.diagnosis.failure import Failure
from echelon.diagnosis.flight import DEFAULT_GROUP, ROOTED, Call, Mismatch, Wait, expected, first_mismatch, tensor
from echelon.diagnosis.lost_peers import lost_peer
from echelon.diagnosis.rank import is_check
from echelon.diagnosis.stacks import called_by_loop, user_frame
from echelon.diagnosis.verdict import Verdict
from echelon.diagnosis.words import USED_ON_SOME, place, sentence, short, stack_of, together, who

__all__ = ["checked", "departs", "mismatch"]

Waits = Mapping[int, tuple[Wait, str]]
_SHOWN_RANKS = 8
# What each rank reports under TORCH_DISTRIBUTED_DEBUG=DETAIL; a barrier has no tensors. What it reports of other ranks is right
# only if all send tensors.
_SAYS = re.compile(
    r"Rank (\d{1,7}) is running collective: CollectiveFingerPrint\(SequenceNumber=(\d{1,12}),? ?OpType=(\w{1,40})"
    r"(?:, TensorShape=\[([\d, ]{0,100})\], TensorDtypes=(\w{1,30}))?"
)
_ONE_OF_TWO = "One made a call too many, or the other one too few: nothing tells which."
_OPS = {"ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "all_gather", "ALLTOALL": "all_to_all"}
_OPS |= {"ALLTOALL_BASE": "all_to_all", "REDUCE_SCATTER": "reduce_scatter", "_REDUCE_SCATTER_BASE": "reduce_scatter"}


def mismatch(evidence: Evidence, waits: Waits) -> Verdict | None:
    """Ranks that called different collectives where all must call the same."""
    mismatches = [each for each in first_mismatch(evidence.flights) if not _follows(each, waits)]
    if not mismatches:
        return None
    # With mismatches in several groups: the group in which a rank still waits.
    waiting = {wait.group for wait, _ in waits.values()}
    return _verdict(evidence, min(mismatches, key=lambda m: (m.group not in waiting, m.group != DEFAULT_GROUP, m.seq)))


def _follows(mismatch: Mismatch, waits: Waits) -> bool:
    """Whether ranks still wait in an earlier rooted call that all ranks had reached.

    If its root differed, other ranks went on with values from the wrong root, and this mismatch only follows.
    """
    before = (wait for wait, _ in waits.values() if wait.group == mismatch.group and wait.call.seq < mismatch.seq)
    return any(ROOTED.search(wait.call.op) and wait.complete and not (wait.missing or wait.unknown) for wait in before)


def checked(evidence: Evidence, waits: Waits) -> Verdict | None:
    """What `--check-collectives` found: each rank's error holds that rank's call."""
    call_of: dict[int, Call] = {}
    for rank, call in _said(evidence):
        call_of.setdefault(rank, call)
    by_key: dict[object, list[int]] = {}
    for rank, call in sorted(call_of.items()):
        by_key.setdefault(call.key, []).append(rank)
    if len(by_key) < 2:
        return None
    ordered = sorted(by_key.values(), key=lambda ranks: (-len(ranks), ranks))
    calls = tuple((call_of[ranks[0]], tuple(ranks)) for ranks in ordered)
    return _verdict(evidence, Mismatch(DEFAULT_GROUP, calls[0][0].seq, calls))


def _said(evidence: Evidence) -> Iterator[tuple[int, Call]]:
    """The calls that ranks reported of themselves, then those that others reported of them."""
    second_hand = []
    for number, rank in sorted(evidence.ranks.items()):
        failure = rank.failure or rank.later
        for name, seq, op, shape, kind in _SAYS.findall(failure.message[:20_000]) if failure is not None else ():
            sizes = [int(size) for size in shape.split(",") if size.strip()]
            shown = [tensor(kind, sizes)] if kind else []
            call = Call(
                int(seq) + 1,
                _OPS.get(op, op.lower()),
                tuple(t for t, _, _ in shown),
                False,
                0,
                tuple((k, n) for _, k, n in shown),
            )
            if int(name) == number:
                yield number, call
            elif int(seq) and int(name) < evidence.world_size:
                second_hand.append((int(name), call))
    yield from second_hand


def _verdict(evidence: Evidence, worst: Mismatch) -> Verdict:
    guilty, odd, due = _odd_ones(evidence, worst)
    parts = {ranks: f"{who(ranks)} called {call.what}" for call, ranks in worst.calls}
    first, rest = [parts[ranks] for ranks in odd], [part for ranks, part in parts.items() if ranks not in odd]
    headline = f"{together(first)} where {together(rest)}" if first and rest else together(list(parts.values()))
    most = worst.calls[0]
    all_told = len(most[1]) + sum(map(len, odd)) == evidence.world_size
    if first and len(rest) == 1 and most[1] not in odd and len(most[1]) > 1 and all_told:
        headline = f"{together(first)} where the others called {most[0].what}"
    of_group = "" if worst.group == DEFAULT_GROUP else f" of group {worst.group!r}"
    how = f" By the calls before, {due} was due." if due else ""
    if swapped := _swapped(evidence, worst):
        how = " They made the same calls in another order."
    elif all("reduce_scatter" in call.op for call, _ in worst.calls):
        how += f" {USED_ON_SOME}"
    elif set(guilty) >= {rank for ranks in parts for rank in ranks} or not guilty:
        how += f" {_ONE_OF_TWO}"
    why = "All ranks of a group must make the same calls in the same order, with the same number of elements of the same type."
    kind = "order" if swapped or len({call.op for call, _ in worst.calls}) > 1 else "shape"
    text = f"{headline}, as collective #{worst.seq}{of_group}{_where_each(evidence, worst)}.{how} {why}"
    return Verdict(guilty, f"mismatched {kind}", headline, sentence(text))


def _odd_ones(evidence: Evidence, mismatch: Mismatch) -> tuple[tuple[int, ...], list[tuple[int, ...]], str]:
    """The guilty ranks; the groups whose call was not the majority's or the one due; and the call due, if that decided."""
    most, next_most = mismatch.calls[0][1], mismatch.calls[1][1]
    if 2 * len(most) > sum(len(ranks) for _, ranks in mismatch.calls) and len(most) > len(next_most):
        odd = [ranks for _, ranks in mismatch.calls[1:]]
        return tuple(sorted(rank for ranks in odd for rank in ranks)), odd, ""
    if _swapped(evidence, mismatch):
        return tuple(sorted((*most, *next_most))), [], ""
    traces = [evidence.flights.get(ranks[0], {}).get(mismatch.group) for _, ranks in mismatch.calls]
    members = dict(due for trace in traces if (due := expected(trace, mismatch.seq)) is not None)
    both = tuple(sorted(rank for _, ranks in mismatch.calls for rank in ranks))
    nobody = both if len(both) == 2 else ()
    if len(members) != 1:
        return nobody, [], ""
    [(due_key, by_several)] = members.items()
    right = [(call, ranks) for call, ranks in mismatch.calls if call.key == due_key]
    if len(right) != 1:
        return nobody, [], ""
    odd = [ranks for _, ranks in mismatch.calls if ranks != right[0][1]]
    alike = all(call.op == right[0][0].op for call, _ in mismatch.calls)
    there = [ranks[0] for (_, ranks), trace in zip(mismatch.calls, traces, strict=True) if trace and trace.last == mismatch.seq]
    decides = by_several or (alike and not _are_apart(evidence, there))
    guilty = tuple(sorted(rank for ranks in odd for rank in ranks)) if decides else nobody
    return guilty, odd, right[0][0].what


def _swapped(evidence: Evidence, mismatch: Mismatch) -> bool:
    """Whether two groups of ranks made the same two calls in opposite order."""
    if len(mismatch.calls) != 2 or len(mismatch.calls[0][1]) != len(mismatch.calls[1][1]):
        return False
    (first, ranks), (other, others) = mismatch.calls
    traces = [evidence.flights.get(who[0], {}).get(mismatch.group) for who in (ranks, others)]
    follows = [trace.calls.get(mismatch.seq + 1) if trace is not None else None for trace in traces]
    return [call.key if call is not None else None for call in follows] == [other.key, first.key]


def departs(evidence: Evidence, waits: Waits) -> Verdict | None:
    """A collective rejected its input, and only some records exist: find the rank whose call breaks its own pattern.

    Gloo ends a rank that receives too much without a record: if all others made the call that was due, that rank did not.
    """
    refused = [f for f in evidence.failures if is_check(f)]
    if not refused:
        return None
    first = Failure.first(refused)
    texts: dict[int, str] = {}
    as_due = set[int]()
    for rank, flight in sorted(evidence.flights.items()):
        for trace in flight.values():
            call, due, before = trace.calls.get(trace.last), expected(trace, trace.last), trace.calls.get(trace.last - 1)
            if call is None or due is None or before is None:
                continue
            if not due[1] and (due[0] != before.key or _are_apart(evidence, (rank, first.rank))):
                continue
            if due[0] == call.key:
                as_due.add(rank)
            elif due[0][0] == call.op:
                what = next(c.what for c in trace.calls.values() if c.key == due[0])
                texts[rank] = (
                    f"{who([rank])} called {call.what} as collective #{call.seq}, where {what} was due by its calls before"
                )
    message = short(first.message.splitlines()[-1] if first.message else first.kind)
    others = set(evidence.all_ranks) - {first.rank}
    alike = _all_in_one_call(waits, others) if len(others) > 1 and first.rank not in evidence.flights else None
    if len(texts) == 1 and alike is None:
        [(rank, headline)] = texts.items()
        if called_by_loop(stack_of(evidence.rank(rank))):
            return None  # at an end of an epoch its calls are not those of a step
        text = f"{headline}{place(evidence.rank(rank))}. {sentence(who([first.rank]))} received it, and failed: {message}"
        return Verdict((rank,), "mismatched shape", headline, sentence(text))
    if len(refused) > 1 or not others or (alike is None and (texts or as_due != others)):
        return _of_two(evidence, first, message) if len(others) == 1 and not texts else None
    headline = f"{who([first.rank])} called a collective with other shapes or types than the others"
    where = place(evidence.rank(first.rank))
    why = (
        "the others made the call that was due by their calls before" if alike is None else f"the others all called {alike.what}"
    )
    text = f"{headline}{where}: {why}, and the collective failed: {message}"
    return Verdict((first.rank,), "mismatched shape", headline, sentence(text))


def _of_two(evidence: Evidence, first: Failure, message: str) -> Verdict | None:
    """The case that only one rank left a record, and both stand at lines of their own: one of them took another way."""
    [other] = set(evidence.all_ranks) - {first.rank}
    trace = evidence.flights.get(other, {}).get(DEFAULT_GROUP)
    call = trace.calls.get(trace.last) if trace is not None else None
    if call is None or not _are_apart(evidence, (first.rank, other)) or called_by_loop(stack_of(evidence.rank(other))):
        return None
    headline = f"{who([other])} called {call.what} where {who([first.rank])} called something else"
    at = [f"{who([rank])}{place(evidence.rank(rank))}" for rank in sorted((other, first.rank))]
    text = f"{headline} ({', '.join(at)}), which rejected what it received: {message} {_ONE_OF_TWO}"
    return Verdict((*sorted((other, first.rank)),), "mismatched shape", headline, sentence(text))


def _are_apart(evidence: Evidence, ranks: Collection[int]) -> bool:
    """Whether the ranks' calls are at different lines of the program. Past a loop, calls need not match those in it.

    False within one and the same step of an echelon loop. A rank whose log shows a lost peer stands where it handles that.
    """
    connected = [rank for rank in map(evidence.rank, ranks) if not lost_peer(rank.logged)]
    lines = {(frame.file, frame.line) for rank in connected if (frame := user_frame(stack_of(rank))) is not None}
    steps = {rank.standing.position for rank in connected if rank.standing is not None and rank.is_known}
    return len(lines) > 1 and (len(steps) != 1 or not all(rank.is_known for rank in connected))


def _all_in_one_call(waits: Waits, ranks: Collection[int]) -> Call | None:
    """The call in which all of these ranks wait; None if there is no such call."""
    calls = {(wait.group, wait.call.seq, wait.call.key): wait for rank in ranks if rank in waits for wait in (waits[rank][0],)}
    wait = next(iter(calls.values())) if len(calls) == 1 else None
    return wait.call if wait is not None and set(wait.waiting) >= set(ranks) else None


def _where_each(evidence: Evidence, mismatch: Mismatch) -> str:
    """For each call, the line where one of its ranks stood in it, or where that rank was later; empty without stacks."""
    parts = []
    for _, ranks in mismatch.calls:
        traces = {rank: evidence.flights.get(rank, {}).get(mismatch.group) for rank in ranks}
        gone_on = {rank for rank, trace in traces.items() if trace is not None and trace.last > mismatch.seq}
        in_order = sorted(ranks, key=lambda rank: rank in gone_on)[:_SHOWN_RANKS]
        placed = next(((rank, at) for rank in in_order if (at := place(evidence.rank(rank)))), None)
        parts += [f"{who(placed[:1])}{' later' if placed[0] in gone_on else ''}{placed[1]}"] if placed is not None else []
    return f" ({', '.join(parts)})" if parts else ""
