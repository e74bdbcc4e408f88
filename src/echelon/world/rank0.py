"""Gather to rank 0, compute there, scatter: for plans that depend on all ranks and of which each rank needs its own part.

With an all-gather each of R ranks would hold R values. Here ranks other than 0 hold only their own.
Collective over the default group, in host memory, without pickle, like `agree`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from echelon.world import agree

__all__ = ["gather", "scatter"]

_DIGEST, _LENGTH = 32, 8


def gather(value: Any) -> tuple[Iterator[Any], list[int]] | None:
    """On rank 0, the distinct values in the order of the first ranks that have them, and for each rank the index of its value.

    None on the other ranks. The value is anything that JSON can hold. A value of several ranks is sent once, compressed.
    """
    if not agree.is_joined():
        return iter([value]), [0]
    group = agree.control_group()
    data = json.dumps(value).encode()
    packed = zlib.compress(data, 1)
    about = _tensor(sha256(data).digest() + len(packed).to_bytes(_LENGTH, "little"))
    asked = torch.zeros(1, dtype=torch.uint8)
    if dist.get_rank(group):
        dist.gather(about, group=group, group_dst=0)
        dist.scatter(asked, group=group, group_src=0)
        if asked.item():
            dist.send(_tensor(packed), group=group, group_dst=0)
        return None
    ranks = dist.get_world_size(group)
    everyones = torch.empty(ranks, about.numel(), dtype=torch.uint8)
    dist.gather(about, list(everyones.unbind()), group=group, group_dst=0)
    tellers, of = _first_tellers(everyones.numpy().tobytes(), ranks)
    asks = torch.zeros(ranks, 1, dtype=torch.uint8)
    asks[list(tellers)] = 1
    dist.scatter(asked, list(asks.unbind()), group=group, group_src=0)
    values = [packed]
    for teller, length in list(tellers.items())[1:]:  # the first is rank 0 itself
        came = torch.empty(length, dtype=torch.uint8)
        dist.recv(came, group=group, group_src=teller)
        values.append(came.numpy().tobytes())
    return (json.loads(zlib.decompress(each)) for each in values), of


def _first_tellers(frames: bytes, ranks: int) -> tuple[dict[int, int], list[int]]:
    """From frames of digest and length: the length by the first rank of each digest, and the index of each rank's digest."""
    each = len(frames) // ranks
    tellers: dict[int, int] = {}
    numbers: dict[bytes, int] = {}
    of = []
    for rank in range(ranks):
        frame = frames[rank * each : (rank + 1) * each]
        digest, length = frame[:_DIGEST], int.from_bytes(frame[_DIGEST:], "little")
        if digest not in numbers:
            numbers[digest] = len(numbers)
            tellers[rank] = length
        of.append(numbers[digest])
    return tellers, of


def scatter(make: Callable[[], Sequence[bytes]]) -> bytes:
    """Call `make` on rank 0 only and scatter its parts. Shorter parts are padded with zeros; an error is raised on all ranks."""
    if not agree.is_joined():
        return make()[0]
    made: list[bytes] = []

    def width() -> int:
        made.extend(make())
        return max(map(len, made))

    packed = torch.zeros(agree.from_rank0(width), dtype=torch.uint8)
    if len(packed):
        parts = [_tensor(each.ljust(len(packed), b"\0")) for each in made] or None
        dist.scatter(packed, parts, group=agree.control_group(), group_src=0)
    return packed.numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
