"""Flight records of ranks: the collectives that each called, compared by process group and sequence number.

The collectives of a group have the same numbers on all its ranks, so the call with a number must be the same everywhere. A rank
that has not reached a number in which others wait is missing there; a rank that called something else under that number is a
mismatch. torch writes the records (2.13: gloo and NCCL as JSON). On gloo they lack point-to-point messages, and the members of
all groups but the default one; echelon adds these under the key "groups".
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echelon.common.terminal import one_line

__all__ = [
    "ROOTED",
    "Call",
    "Flight",
    "Mismatch",
    "Trace",
    "Wait",
    "expected",
    "first_mismatch",
    "last_call",
    "of_last_calls",
    "parse",
    "reopened",
    "tensor",
    "waits",
]

DEFAULT_GROUP = "0"
_MOST_CALLS = 20_000
_MOST_SEQ = 1 << 53
_OF_TENSORS = ("input_sizes", "input_dtypes", "output_sizes", "output_dtypes")
# A sequence this long that occurred before, in the same order, is no coincidence; a shorter one of a single kind must occur more
# often.
_TELLING, _LONGEST_REPEAT = 3, 64
_TYPES = {
    "Float": "f32",
    "Double": "f64",
    "Half": "f16",
    "BFloat16": "bf16",
    "Long": "i64",
    "Int": "i32",
    "Short": "i16",
    "Char": "i8",
    "Byte": "u8",
    "Bool": "bool",
    "ComplexFloat": "c64",
    "ComplexDouble": "c128",
}
# The tensors that must be alike on all ranks. A scatter's input and a gather's output are the root's alone; in all_to_all each
# rank may send other sizes; a barrier has no tensors.
_BY_INPUT = re.compile(r"all_?reduce|broadcast|all_?gather|^reduce$|^gather")
_BY_OUTPUT = re.compile(r"reduce_?scatter|^scatter")

ROOTED = re.compile("broadcast|^reduce$|^gather|^scatter")  # calls with a root rank as an argument


@dataclass(frozen=True)
class Call:
    """One collective that a rank called.

    Args:
        seq: its number in the group.
        op: such as "all_reduce".
        tensors: as "f32[4]".
        done: it has ended on this rank.
        time_ns: when it was called, by the clock of the rank's machine.
        alike: types and numbers of elements, which must be the same on all ranks. Shapes may differ.
    """

    seq: int
    op: str
    tensors: tuple[str, ...] = ()
    done: bool = False
    time_ns: int = 0
    alike: tuple[tuple[str, int], ...] = ()

    @property
    def key(self) -> tuple[str, tuple[tuple[str, int], ...]]:
        return self.op, self.alike

    @property
    def what(self) -> str:
        """As "all_gather (f32[8])"."""
        shown = ", ".join(self.tensors[:3]) + (", ..." if len(self.tensors) > 3 else "")
        return f"{self.op} ({shown})" if shown else self.op

    def __str__(self) -> str:
        """As "all_reduce #118"."""
        return f"{self.op} #{self.seq}"


@dataclass(frozen=True)
class Trace:
    """A rank's calls in one process group, by their numbers.

    Args:
        members: ranks of the group; None if the record does not say.
        at_least: number of its last call, where only that is known.
    """

    name: str
    description: str = ""
    members: frozenset[int] | None = None
    calls: Mapping[int, Call] = field(default_factory=dict)
    at_least: int = 0

    @property
    def last(self) -> int:
        return max(self.calls, default=self.at_least)

    @property
    def open(self) -> Call | None:
        """The first call that has not ended."""
        return next((self.calls[seq] for seq in sorted(self.calls) if not self.calls[seq].done), None)


Flight = Mapping[str, Trace]


@dataclass(frozen=True)
class Wait:
    """Ranks that wait in one call, and those that have not reached it.

    Args:
        complete: all members of the group are known.
        unknown: members without a record.
    """

    group: str
    call: Call
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    unknown: tuple[int, ...] = ()
    complete: bool = True


@dataclass(frozen=True)
class Mismatch:
    """Different calls under one number. `calls`: each with the ranks that made it, the most frequent first."""

    group: str
    seq: int
    calls: tuple[tuple[Call, tuple[int, ...]], ...]


def parse(record: Mapping[str, Any]) -> Flight:
    """Parse torch's JSON. Unexpected values are left out."""
    entries = record.get("entries")
    calls: dict[str, dict[int, Call]] = {}
    descriptions: dict[str, str] = {}
    for entry in entries[-_MOST_CALLS:] if isinstance(entries, list) else ():
        call, group = _call(entry), entry.get("process_group") if isinstance(entry, dict) else None
        # NCCL's watchdog has tuples where torch's JSON has lists.
        if call is None or not isinstance(group, (list, tuple)) or not all(isinstance(g, str) for g in group[:2]) or not group:
            continue
        # Under TORCH_DISTRIBUTED_DEBUG=DETAIL groups have no names: pg_id 0 is the default one, the rest cannot be told apart.
        name = one_line(group[0][:80]) or (DEFAULT_GROUP if entry.get("pg_id") == 0 else "")
        if not name:
            continue
        of_group = calls.setdefault(name, {})
        if call.seq in of_group:  # a new group of the same name
            of_group.clear()
        of_group[call.seq] = call
        descriptions[name] = one_line(group[1][:80]) if len(group) > 1 else ""
    members = _members(record.get("groups"))
    return {
        name: Trace(name, descriptions.get(name, ""), members.get(name), calls.get(name, {})) for name in {**members, **calls}
    }


def reopened(flight: Flight) -> Flight:
    """Reopen the last call of a rank that an error threw out of it: gloo's records wrongly mark that call as ended."""
    if (last := last_call(flight)) is None:
        return flight
    name, call = last
    trace = flight[name]
    return {**flight, name: replace(trace, calls={**trace.calls, call.seq: replace(call, done=False)})}


def last_call(flight: Flight) -> tuple[str, Call] | None:
    """The latest call of all groups, with its group's name; None if no call is known."""
    calls = [(name, call) for name, trace in flight.items() for call in trace.calls.values()]
    return max(calls, key=lambda found: (found[1].time_ns, found[0], found[1].seq), default=None)


_LAST = re.compile(r".{0,80}#(\d{1,15})")


def of_last_calls(last: Mapping[str, Any]) -> Flight:
    """A flight of which only the last call of each group is known: {"0": "all_reduce #118"}."""
    numbers = {name[:80]: _LAST.fullmatch(text) for name, text in list(last.items())[:10_000] if isinstance(text, str)}
    return {one_line(name): Trace(one_line(name), at_least=int(match[1])) for name, match in numbers.items() if match}


def _members(groups: Any) -> dict[str, frozenset[int]]:
    """The members of each group, from {"1": {"ranks": [0, 2]}}."""
    members = {}
    for name, group in list(groups.items())[:10_000] if isinstance(groups, dict) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else group
        if isinstance(ranks, list) and ranks and all(type(rank) is int and 0 <= rank < 1 << 31 for rank in ranks):
            members[one_line(name[:80])] = frozenset(ranks)
    return members


def _call(entry: Any) -> Call | None:
    if not isinstance(entry, dict) or entry.get("is_p2p"):
        return None
    seq, name = entry.get("collective_seq_id"), entry.get("profiling_name")
    if type(seq) is not int or not 0 <= seq < _MOST_SEQ or not isinstance(name, str):
        return None
    done = entry.get("retired") is True or entry.get("state") == "completed"
    time_ns = entry.get("time_created_ns")
    time_ns = time_ns if type(time_ns) is int and 0 <= time_ns < 1 << 63 else 0
    op, shown, alike = _what(name[:80], *(_hashable(entry.get(key)) for key in _OF_TENSORS))
    return Call(seq, op, shown, done, time_ns, alike)


def _hashable(value: Any) -> tuple[Any, ...]:
    """Shapes or types as hashable values; None for anything else, since hashing would descend into tuples of any depth."""
    return tuple(map(_shape_or_type, value[:64])) if isinstance(value, list) else ()


def _shape_or_type(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(value[:16]) if all(type(n) is int and 0 <= n < 1 << 62 for n in value[:16]) else None
    return value[:80] if isinstance(value, str) else None


@functools.lru_cache(maxsize=4096)
def _what(name: str, *given: tuple[Any, ...]) -> tuple[str, tuple[str, ...], tuple[tuple[str, int], ...]]:
    """The operation, its tensors as shown, and what must be alike. Cached: programs repeat their calls, on all ranks."""
    op = one_line(name.rpartition(":")[2]).strip() or "a collective"
    inputs, outputs = _tensors(*given[:2]), _tensors(*given[2:])
    alike = outputs if _BY_OUTPUT.search(op) else inputs if _BY_INPUT.search(op) else []
    return op, tuple(text for text, _, _ in alike or inputs), tuple((kind, size) for _, kind, size in alike)


def _tensors(sizes: Sequence[Any], kinds: Sequence[Any]) -> list[tuple[str, str, int]]:
    """(text, type, number of elements) of each tensor."""
    return [
        tensor(kind, size) for size, kind in zip(sizes, kinds, strict=False) if isinstance(size, tuple) and isinstance(kind, str)
    ]


def tensor(kind: str, size: Sequence[int]) -> tuple[str, str, int]:
    """(text such as "f32[4]", type, number of elements), from torch's name of the type."""
    short = _TYPES.get(kind, one_line(kind[:20]))
    return f"{short}{list(size[:16])}", short, math.prod(size[:16])


def _by_group(flights: Mapping[int, Flight]) -> dict[str, dict[int, Trace]]:
    groups: dict[str, dict[int, Trace]] = {}
    for rank, flight in flights.items():
        for name, trace in flight.items():
            groups.setdefault(name, {})[rank] = trace
    return groups


def first_mismatch(flights: Mapping[int, Flight]) -> list[Mismatch]:
    """For each group, the first number under which ranks called different collectives."""
    mismatches = []
    for name, traces in sorted(_by_group(flights).items()):
        callers = {rank: trace for rank, trace in traces.items() if trace.calls}
        if len(callers) < 2:
            continue
        for seq in sorted(set().union(*(trace.calls for trace in callers.values()))):
            by_key: dict[Any, list[int]] = {}
            for rank, trace in sorted(callers.items()):
                if seq in trace.calls:
                    by_key.setdefault(trace.calls[seq].key, []).append(rank)
            if len(by_key) > 1:
                ordered = sorted(by_key.values(), key=lambda ranks: (-len(ranks), ranks))
                mismatches.append(Mismatch(name, seq, tuple((callers[ranks[0]].calls[seq], tuple(ranks)) for ranks in ordered)))
                break
    return mismatches


def expected(trace: Trace | None, seq: int) -> tuple[Any, bool] | None:
    """The key of the call due at `seq`, by the calls before: programs repeat theirs, step by step. None if they do not tell.

    Takes the longest run of latest calls that occurred before, and the call that always followed it. The flag says whether the
    run has several kinds of calls: with one kind, a loop that goes on cannot be told from one that has ended.
    """
    before = [trace.calls[number].key for number in sorted(trace.calls) if number < seq] if trace is not None else []
    for length in range(min(_LONGEST_REPEAT, len(before) // 2), 0, -1):
        end = before[-length:]
        followed = [before[at + length] for at in range(len(before) - length) if before[at : at + length] == end]
        if len(followed) > 1 or (followed and (length >= _TELLING or len(set(end)) > 1)):
            return (followed[0], len(set(end)) > 1) if len(set(followed)) == 1 else None
    return None


def waits(flights: Mapping[int, Flight], ranks: Sequence[int]) -> list[Wait]:
    """Every call that has not ended: the ranks that wait in it, and those that have not reached it.

    Args:
        ranks: all ranks of the run, the members of the default group.
    """
    all_waits = []
    for name, traces in sorted(_by_group(flights).items()):
        known_members = next((trace.members for trace in traces.values() if trace.members), None)
        members = known_members if known_members is not None else frozenset(ranks) if name == DEFAULT_GROUP else frozenset(traces)
        open_calls: dict[int, list[int]] = {}
        for rank, trace in sorted(traces.items()):
            if trace.open is not None:
                open_calls.setdefault(trace.open.seq, []).append(rank)
        for seq, waiting in sorted(open_calls.items()):
            last = {rank: traces[rank].last if rank in traces else 0 for rank in members if rank in flights}
            missing = tuple(sorted(rank for rank, number in last.items() if number < seq))
            unknown = tuple(sorted(members - flights.keys()))
            complete = known_members is not None or name == DEFAULT_GROUP
            all_waits.append(Wait(name, traces[waiting[0]].calls[seq], tuple(waiting), missing, unknown, complete))
    return all_waits
