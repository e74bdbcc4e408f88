"""CRC-32 of files, block by block: by the fastest implementation that is installed, and on several threads.

Every implementation uses zlib's polynomial, so each can verify what another wrote. zlib-ng uses the processor's carry-less
multiplication, which was measured at three times zlib's speed (BENCHMARKS.md); it is the extra `echelon[fast]`. Each block has a
checksum of its own, so threads work independently, and both libraries release the GIL.
"""

from __future__ import annotations

import importlib
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from echelon.common.errors import LauncherEnvironmentError
from echelon.common.machine import usable_cores
from echelon.contracts.rank import RankInfo

__all__ = ["BLOCK_BYTES", "Sums", "crc32", "fastest", "threads"]

# The part of a file that one checksum covers. Ranks and threads divide the verification of a file by blocks.
BLOCK_BYTES = 64 << 20

_MOST = 4  # threads: with zlib-ng two are faster than any disk
_CHECK = (b"123456789", 0xCBF43926)  # the standard check value of this CRC


def fastest() -> Callable[..., int]:
    """zlib-ng's function if it is installed and computes what zlib's does."""
    try:
        function: Callable[..., int] = importlib.import_module("zlib_ng.zlib_ng").crc32
    except ImportError:
        return zlib.crc32
    return function if function(_CHECK[0]) == _CHECK[1] else zlib.crc32


crc32 = fastest()


def threads() -> int:
    """How many threads this rank may use: its share of the node's cores, up to four."""
    try:
        ranks = RankInfo.from_env().local_world_size
    except LauncherEnvironmentError:
        ranks = 1
    return max(1, min(_MOST, usable_cores() // ranks))


class Sums:
    """The checksums of a stream's blocks. A context: threads start at the first whole block and end with the context.

    Args:
        most: threads besides the caller's; 0 computes in `add`. With threads, added data must stay unchanged until `entry`.
    """

    def __init__(self, most: int = 0) -> None:
        self.size = 0
        self._most = most
        self._pool: ThreadPoolExecutor | None = None
        self._block: list[memoryview] = []  # parts of the current block that are not summed up yet
        self._now = 0  # the current block's checksum so far
        self._done: list[int | Future[int]] = []
        self._waiting: deque[Future[int]] = deque()

    def __enter__(self) -> Sums:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def add(self, data: memoryview) -> None:
        while len(data):
            room = BLOCK_BYTES - self.size % BLOCK_BYTES
            part, data = data[:room], data[room:]
            self.size += len(part)
            if self._most:
                self._block.append(part)
            else:
                self._now = crc32(part, self._now)
            if self.size % BLOCK_BYTES == 0:
                self._done.append(self._submitted() if self._most else self._now)
                self._block, self._now = [], 0

    def _submitted(self) -> Future[int]:
        if self._pool is None:
            from echelon.world.device import in_thread  # imported here: listing and verifying need no torch

            # Such a thread may hold the last reference to a tensor, and frees page-locked memory on the device of that memory.
            self._pool = ThreadPoolExecutor(self._most, initializer=in_thread(lambda: None))
        if len(self._waiting) > self._most:  # else a slow checksum would keep the copies of all tensors alive
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(_of, self._block))
        return self._waiting[-1]

    def entry(self) -> dict[str, Any]:
        """The manifest entry of a file that holds the stream."""
        whole = [each.result() if isinstance(each, Future) else each for each in self._done]
        rest = [_of(self._block, self._now)] if self.size % BLOCK_BYTES else []
        return {"size": self.size, "crc32": [f"{value:08x}" for value in [*whole, *rest]]}


def _of(parts: Iterable[memoryview], start: int = 0) -> int:
    for part in parts:
        start = crc32(part, start)
    return start
