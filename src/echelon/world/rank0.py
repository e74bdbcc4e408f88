"""Gather to rank 0, compute there, scatter: for plans that depend on all ranks, of which each needs its own part.

With an all-gather every rank would hold what all have said: of R ranks, R times R messages. Here the others hold their own.
Collective over the default group, on host memory, without pickle, as `agree` is.
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
    """On rank 0 the different values of all ranks, in the order of the first ranks that have them, and by rank which one it has.

    Elsewhere None. The value is anything that JSON can hold. What several ranks have is sent once, compressed.
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
    """Of digests with lengths: by the first rank that has one its length, and which of these digests each rank has."""
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
    """Rank 0 alone makes something for each rank; every rank gets its own, or the error. Shorter ones end in zeros."""
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
