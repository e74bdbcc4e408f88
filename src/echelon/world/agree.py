"""How ranks agree before they act: rule of truth 5. Small messages in host memory, without pickle.

All functions are collective over the default group, or over the group passed: every rank of it calls them in the same order. In a
world of one they return at once. The default group needs a backend for host memory (gloo), which `init_from_env` always provides.

What a rank receives, with R ranks and values of B bytes: one value by `any_rank`, `first_not_none`, `same_on_all` and
`from_rank0`, and by `kinds` if all values are equal. Otherwise `kinds` sends R digests and the different values. `gather` sends
R x B bytes and is for a few words only. Use `rank0` for values that only rank 0 needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from echelon.common import errors
from echelon.common.errors import TOLD_BY, EchelonError, RanksDisagreeError
from echelon.world.timeout import timeout_of_default_group

__all__ = [
    "AnyRanksLater",
    "alone",
    "any_rank",
    "any_ranks",
    "any_ranks_and_number",
    "channel",
    "control_group",
    "fail_together",
    "first_not_none",
    "from_one",
    "from_rank0",
    "gather",
    "in_json",
    "is_alone",
    "is_rank0",
    "is_same",
    "kinds",
    "made_of",
    "raise_on_all",
    "rank",
    "same_on_all",
    "told_error",
    "unless_same",
]

T = TypeVar("T")

_side_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


_is_alone = False


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Context without messages: this rank's value counts for all ranks. For a world whose other ranks do not exist."""
    global _is_alone
    before, _is_alone = _is_alone, True
    try:
        yield
    finally:
        _is_alone = before


def is_alone() -> bool:
    """Whether the `alone` context is active."""
    return _is_alone


def is_joined() -> bool:
    """Whether this process has joined other ranks."""
    return not _is_alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """This process's rank in the default group; 0 if it has not joined others."""
    return dist.get_rank() if is_joined() else 0


def is_rank0() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not is_joined() or dist.get_rank() == 0


def control_group() -> dist.ProcessGroup | None:
    """The group for messages in host memory: the default group if it has gloo, else a separate gloo group, made once.

    The first call is collective if the default group lacks gloo, for example if a user starts plain "nccl".
    """
    default = dist.group.WORLD
    if default is None or _is_alone:
        return default
    if "gloo" in str(dist.get_backend_config()):
        return default
    if default not in _side_groups:
        made = dist.new_group(backend="gloo", timeout=timeout_of_default_group())
        assert made is not None
        _side_groups[default] = made
    return _side_groups[default]


def any_rank(flag: bool) -> bool:
    """True on all ranks if it is true on one."""
    if not is_joined():
        return flag
    value = torch.tensor([1 if flag else 0], dtype=torch.int32)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=control_group())
    return bool(value.item())


def any_ranks(flags: Sequence[bool]) -> list[bool]:
    """`any_rank` for each of several flags; their number must be the same on all ranks."""
    if not is_joined() or not flags:
        return list(flags)
    # As bits: gloo sends each element of a short message separately, which takes as long as the whole message.
    words = [sum(int(flag) << bit for bit, flag in enumerate(flags[at : at + _BITS])) for at in range(0, len(flags), _BITS)]
    values = torch.tensor(words, dtype=torch.int64)
    dist.all_reduce(values, op=dist.ReduceOp.BOR, group=control_group())
    flags_of_all = values.tolist()
    return [bool(flags_of_all[i // _BITS] >> i % _BITS & 1) for i in range(len(flags))]


_BITS = 62  # of an int64, without the sign


def any_ranks_and_number(flags: Sequence[bool], number: int) -> tuple[list[bool], int]:
    """`any_ranks`, and in the same message a number of rank 0, from 0 to 2**32 - 1."""
    bits = [is_rank0() and bool(number >> bit & 1) for bit in range(32)]
    flags_of_all = any_ranks([*flags, *bits])
    return flags_of_all[: len(flags)], sum(int(flag) << bit for bit, flag in enumerate(flags_of_all[len(flags) :]))


class AnyRanksLater:
    """`any_ranks` for repeated flags: each call sends the flags and returns the result of the previous call.

    So no call waits for the network. Every rank must make the same number of calls, with the same number of flags, at most 62.
    """

    def __init__(self) -> None:
        self._work: dist.Work | None = None
        self._value = torch.zeros(1, dtype=torch.int64)
        self._told_alone = 0

    def __call__(self, *flags: bool) -> list[bool]:
        answer, bits = self.last(), sum(int(flag) << bit for bit, flag in enumerate(flags))
        if _is_alone:
            self._told_alone = bits
            return [bool(answer >> bit & 1) for bit in range(len(flags))]
        self._value = torch.tensor([bits], dtype=torch.int64)
        self._work = dist.all_reduce(self._value, op=dist.ReduceOp.BOR, group=control_group(), async_op=True)
        return [bool(answer >> bit & 1) for bit in range(len(flags))]

    def last(self) -> int:
        """The result of the latest call, as bits."""
        if self._work is None:
            bits, self._told_alone = self._told_alone, 0
            return bits
        self._work.wait()
        self._work = None
        return int(self._value.item())


def channel(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, torch.device]:
    """The group to use for agreements of the ranks of `group`, and the device of its messages: the CPU if possible."""
    if group is None or group is dist.group.WORLD:
        return control_group(), torch.device("cpu")
    if "gloo" in str(dist.get_backend_config(group)):
        return group, torch.device("cpu")
    return group, torch.device("cuda", torch.cuda.current_device())


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """All-gather a value that JSON can hold; returns the values by rank. Short values take one collective."""
    if not is_joined():
        return [value]
    group, device = channel(group)

    data = json.dumps(value).encode()
    frames = _of_all(_frame(data).to(device), group)
    lengths = [int.from_bytes(frame[:_LENGTH], "little") for frame in frames]
    rest = max(lengths) - _SHORT
    if rest > 0:
        longer = torch.zeros(rest, dtype=torch.uint8)
        longer[: max(0, len(data) - _SHORT)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)[_SHORT:]
        frames = [frame + more for frame, more in zip(frames, _of_all(longer.to(device), group), strict=True)]
    return [json.loads(frame[_LENGTH : _LENGTH + length]) for frame, length in zip(frames, lengths, strict=True)]


def _of_all(payload: torch.Tensor, group: dist.ProcessGroup | None) -> list[bytes]:
    """All-gather bytes; their number must be the same on all ranks."""
    ranks, each = dist.get_world_size(group), payload.numel()
    parts = torch.empty(ranks, each, dtype=torch.uint8, device=payload.device)
    dist.all_gather(list(parts.unbind()), payload, group=group)
    data = parts.cpu().numpy().tobytes()
    return [data[at : at + each] for at in range(0, ranks * each, each)]


# Size of a message's first part: its length, and as much of its content as fits. Most agreements are `null` or a few words.
_FRAME, _LENGTH = 256, 8
_SHORT = _FRAME - _LENGTH


def _frame(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(len(data).to_bytes(_LENGTH, "little") + data[:_SHORT].ljust(_SHORT)), dtype=torch.uint8)


def _from(rank: int, value: Any, group: dist.ProcessGroup | None) -> Any:
    """Broadcast the value of one rank of the group. Values of other ranks are ignored."""
    group, device = channel(group)
    speaks = dist.get_rank(group) == rank
    data = json.dumps(value if speaks else None).encode()
    frame = _frame(data).to(device)
    dist.broadcast(frame, group=group, group_src=rank)
    head = frame.cpu().numpy().tobytes()
    length = int.from_bytes(head[:_LENGTH], "little")
    if length > _SHORT:
        rest = torch.frombuffer(bytearray(data[_SHORT:] if speaks else length - _SHORT), dtype=torch.uint8).to(device)
        dist.broadcast(rest, group=group, group_src=rank)
        head += rest.cpu().numpy().tobytes()
    return json.loads(head[_LENGTH : _LENGTH + length])


def first_not_none(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The value of the first rank whose value is not None; None if all are None. The value is anything that JSON can hold.

    One collective if all values are None.
    """
    if not is_joined():
        return value
    channel_, device = channel(group)
    rank, ranks = dist.get_rank(channel_), dist.get_world_size(channel_)
    first = torch.tensor([ranks if value is None else rank], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=channel_)
    teller = int(first.item())
    return None if teller == ranks else _from(teller, value, group)


def raise_on_all(problem: str | None, kind: type[Exception] = errors.UsageError) -> None:
    """Raise the problem of the first rank that has one, on all ranks. Collective."""
    if (first := first_not_none(problem)) is not None:
        raise kind(first)


def fail_together(error: Exception | None, where: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise on all ranks if a rank has an error. A failed rank calls it after all messages that others wait for.

    Args:
        where: what failed, for the error of the other ranks.
    Raises:
        Exception: a rank's own error; on ranks without one `told_error` of the first rank that has one.
    """
    failure = first_not_none(None if error is None else [rank(), *in_json(error)], group)
    if error is not None:
        raise error
    if failure is not None:
        raise told_error(where, *failure)


def in_json(error: Exception) -> list[Any]:
    """An error as JSON for other ranks: the name of its class, its text, and its fields."""
    # A failure here would leave the others waiting. So `fields` of foreign errors, which may be anything, are skipped.
    fields = error.fields if isinstance(error, EchelonError) else {}
    return [type(error).__name__, str(error), json.loads(json.dumps(fields, default=str, skipkeys=True))]


def made_of(kind: str, text: str, fields: dict[str, Any]) -> EchelonError | None:
    """The error from its parts of `in_json`; None if its class is not one of echelon's."""
    known = getattr(errors, kind, None)
    return known(text, **fields) if isinstance(known, type) and issubclass(known, EchelonError) else None


def told_error(where: str, of_rank: int, kind: str, text: str, fields: dict[str, Any]) -> EchelonError:
    """Another rank's error, from its parts of `in_json`."""
    made = made_of(kind, text, fields) or EchelonError(f"{where} failed: {kind}: {text}")
    made.add_note(f"{TOLD_BY} {of_rank}.")
    return made


def kinds(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The distinct values of all ranks, in the order of the first ranks that have them. The value is anything that JSON can hold.

    One small collective if all values are equal, however long they are.
    """
    if not is_joined():
        return [value]
    data = json.dumps(value).encode()
    if _is_same(data, group):
        return [json.loads(data)]
    channel_, device = channel(group)
    digests = _of_all(torch.frombuffer(bytearray(_digest(data)), dtype=torch.uint8).to(device), channel_)
    firsts = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    if 2 * len(firsts) > len(digests):  # most values differ: one gather is cheaper
        values = gather(value, group)
        return [values[rank] for rank in sorted(firsts.values())]
    return [_from(rank, value, group) for rank in sorted(firsts.values())]


def is_same(value: Any, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the value is equal on all ranks, by one small collective. The value is anything that JSON can hold."""
    return not is_joined() or _is_same(json.dumps(value).encode(), group)


def from_one(rank: int, say: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `say` on one rank of the group only, and broadcast its value."""
    if not is_joined():
        return say()
    value: T = _from(rank, say() if dist.get_rank(channel(group)[0]) == rank else None, group)
    return value


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _is_same(data: bytes, group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks have the same bytes: the largest digest equals the smallest."""
    group, device = channel(group)
    words = torch.frombuffer(bytearray(_digest(data)), dtype=torch.int64)
    both = torch.cat([words, ~words]).to(device)  # ~ reverses the order and cannot overflow
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    most, least = both.cpu().chunk(2)
    return torch.equal(most, ~least)


def unless_same(name: str, value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """None if the value is equal on all ranks, by one small collective; else the values by rank.

    Raises:
        RanksDisagreeError: on every rank, if a rank compares something else, because it has made other calls.
    """
    if is_same([name, value], group):
        return None
    values = gather([name, value], group)
    if any(not isinstance(each, list) or len(each) != 2 or each[0] != name for each in values):
        places = [
            each[0] if isinstance(each, list) and each and isinstance(each[0], str) else "something else" for each in values
        ]
        shown = ", ".join(f"rank {r}: {place}" for r, place in enumerate(places[:16])) + (", ..." if len(places) > 16 else "")
        raise RanksDisagreeError(
            f"the ranks must make the same calls, but compare different things: {shown}. Let all ranks train, evaluate, test and "
            "save together, without `if rank == 0`."
        )
    return [each[1] for each in values]


def same_on_all(name: str, value: T, remedy: str, group: dist.ProcessGroup | None = None) -> T:
    """Return `value` if it is equal on all ranks.

    Raises:
        RanksDisagreeError: on every rank, with each rank's value and `remedy`.
    """
    if not is_joined():
        return value
    values = unless_same(name, value, group)
    if values is None:
        return value
    if all(v == values[0] for v in values):  # as 1 and 1.0, or dicts in another order
        return value
    apart = _where_apart(values)
    shown = ", ".join(f"rank {r}: {v}" for r, v in enumerate(apart[:16])) + (", ..." if len(values) > 16 else "")
    raise RanksDisagreeError(f"ranks disagree about {name}: {shown}. {remedy}", name=name, values=values)


def _where_apart(values: list[Any]) -> list[Any]:
    """Only the entries that differ, if all values are dicts with the same keys."""
    if not all(isinstance(each, dict) and each.keys() == values[0].keys() for each in values):
        return values
    names = [name for name in values[0] if any(each[name] != values[0][name] for each in values)]
    return [{name: each[name] for name in names} for each in values]


def from_rank0(read: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `read` on the first rank only; every rank gets its value, or its error. The value is anything that JSON can hold.

    For reads that must be consistent, such as of a folder of which another machine may still see an older state.
    """
    if not is_joined():
        return read()
    answer: dict[str, Any] = {}
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            answer = {"value": read()}
        except Exception as error:  # any error must reach the other ranks
            failure, answer = error, {"error": in_json(error)}
    first = _from(0, answer, group)
    if failure is not None:
        raise failure
    if "error" in first:
        raise told_error("rank 0", 0, *first["error"])
    value: T = first["value"]
    return value
