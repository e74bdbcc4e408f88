"""How ranks agree before they act: rule of truth 5. Small, on host memory, without pickle.

All functions are collective over the default group, or the one that they are given: every rank of it calls them in the same
order. In a world of one they return at once. The default group needs a backend for host memory (gloo), which `init_from_env`
always provides.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from echelon.contracts.errors import EchelonError, RanksDisagreeError
from echelon.world.timeout import timeout_of_default_group

__all__ = ["AnyRankLater", "any_rank", "channel", "control_group", "from_rank0", "gather", "is_rank0", "same_on_all"]

T = TypeVar("T")

_side_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def is_joined() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_rank0() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not is_joined() or dist.get_rank() == 0


def control_group() -> dist.ProcessGroup | None:
    """The group for host memory: the default one if it has a CPU backend, else a gloo group beside it, made once.

    Collective at its first call for a default group without a CPU backend, as when a user starts plain "nccl".
    """
    default = dist.group.WORLD
    if default is None:
        return None
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


class AnyRankLater:
    """`any_rank` for a flag that is asked again and again: each call sends the flag and returns the answer of the call before.

    Nothing waits for the network. Every rank makes equally many calls.
    """

    def __init__(self) -> None:
        self._work: dist.Work | None = None
        self._value = torch.zeros(1, dtype=torch.int32)

    def __call__(self, flag: bool) -> bool:
        answer = self.last()
        self._value = torch.tensor([1 if flag else 0], dtype=torch.int32)
        self._work = dist.all_reduce(self._value, op=dist.ReduceOp.MAX, group=control_group(), async_op=True)
        return answer

    def last(self) -> bool:
        """The answer of the latest call."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._value.item())


def channel(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, torch.device]:
    """The group over which to talk about `group`'s business, and where its messages must lie: host memory, if it can be."""
    if group is None or group is dist.group.WORLD:
        return control_group(), torch.device("cpu")
    if "gloo" in str(dist.get_backend_config(group)):
        return group, torch.device("cpu")
    return group, torch.device("cuda", torch.cuda.current_device())


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, by rank, on every rank. The value is anything that JSON can hold; a short one takes one collective."""
    if not is_joined():
        return [value]
    group, device = channel(group)

    def exchange(mine: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        return parts

    data = json.dumps(value).encode()
    frames = [part.cpu().numpy().tobytes() for part in exchange(_frame(data).to(device))]
    lengths = [int.from_bytes(frame[:_LENGTH], "little") for frame in frames]
    rest = max(lengths) - _SHORT
    if rest > 0:
        longer = torch.zeros(rest, dtype=torch.uint8)
        longer[: max(0, len(data) - _SHORT)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)[_SHORT:]
        frames = [frame + part.cpu().numpy().tobytes() for frame, part in zip(frames, exchange(longer.to(device)), strict=True)]
    return [json.loads(frame[_LENGTH : _LENGTH + length]) for frame, length in zip(frames, lengths, strict=True)]


# A message's first part has this size: its length, and as much of it as fits. Most agreements are `null` or a few words.
_FRAME, _LENGTH = 256, 8
_SHORT = _FRAME - _LENGTH


def _frame(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(len(data).to_bytes(_LENGTH, "little") + data[:_SHORT].ljust(_SHORT)), dtype=torch.uint8)


def _from_first(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The first rank's value. What it is elsewhere does not matter."""
    group, device = channel(group)
    data = json.dumps(value).encode()
    frame = _frame(data).to(device)
    dist.broadcast(frame, group=group, group_src=0)
    head = frame.cpu().numpy().tobytes()
    length = int.from_bytes(head[:_LENGTH], "little")
    if length > _SHORT:
        is_first = dist.get_rank(group) == 0
        rest = torch.frombuffer(bytearray(data[_SHORT:] if is_first else length - _SHORT), dtype=torch.uint8).to(device)
        dist.broadcast(rest, group=group, group_src=0)
        head += rest.cpu().numpy().tobytes()
    return json.loads(head[_LENGTH : _LENGTH + length])


def same_on_all(name: str, value: T, remedy: str, group: dist.ProcessGroup | None = None) -> T:
    """Return `value` if every rank has the same.

    Raises:
        RanksDisagreeError: on every rank, with each rank's value and `remedy`.
    """
    if not is_joined():
        return value
    values = gather(value, group)
    if all(v == values[0] for v in values):
        return value
    shown = ", ".join(f"rank {r}: {v}" for r, v in enumerate(values[:16])) + (", ..." if len(values) > 16 else "")
    raise RanksDisagreeError(f"ranks disagree about {name}: {shown}. {remedy}")


def from_rank0(read: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The first rank alone runs `read`; every rank gets its value, or its error. The value is anything that JSON can hold.

    For what only one rank should look at: a folder that another machine may still see as it was.
    """
    if not is_joined():
        return read()
    answer: dict[str, Any] = {}
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            answer = {"value": read()}
        except Exception as error:  # it must reach the other ranks, whatever it is
            failure, answer = error, {"error": f"{type(error).__name__}: {error}"}
    first = _from_first(answer, group)
    if failure is not None:
        raise failure
    if "error" in first:
        raise EchelonError(f"rank 0 failed: {first['error']}")
    value: T = first["value"]
    return value
