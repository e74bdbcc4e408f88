"""Whether ranks that share layers draw the same random numbers in their passes, as they must.

Tensor parallelism computes on all of its ranks what lies between split layers: dropout there, and the noise that a loss draws,
must be alike. Their streams are, until one rank draws for itself, as rank 0 does for a picture in its log: from then on each
trains with masks of its own, parameters that all have whole drift apart, and nothing fails.

It saves who draws a picture or a sample for the log on rank 0 (tests/parallel/test_same_draws.py).

Each window ends with a number of each rank, in the message that the window sends in any case. The numbers of ranks that share
layers add up to 0 if their streams stand alike. Where the passes draw nothing, ranks say 0: then nothing is wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from echelon.common.errors import RanksDisagreeError
from echelon.parallel.guards.guard import Guard
from echelon.world import agree, rng

__all__ = ["SameDraws"]


class SameDraws(Guard):
    """What this rank says of its stream.

    Args:
        rank, size: its place among the ranks that share its layers.
        device: what it computes on, whose stream is looked at.
    """

    numbers = 1
    is_always_told = True

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self._factor, self._device = (size - 1 if rank == 0 else -1), device
        self._before = self._said = 0

    def begin_pass(self, *, first: bool) -> None:
        self._before, self._said = self._now(), 0 if first else self._said

    def end_pass(self) -> None:
        if (now := self._now()) != self._before:
            self._before, self._said = now, zlib.crc32(now.to_bytes(4, "little"), self._said)

    def signature(self) -> tuple[float]:
        return (float(self._said * self._factor),)  # below 2**32 x size

    def check(self, sums: Sequence[float], ranks: int, update: int) -> None:
        if any(sums):
            raise RanksDisagreeError(
                f"ranks that share layers (tp) must draw the same random numbers, got different ones in update {update}: dropout "
                "or noise would differ from rank to rank, and their parameters would drift apart. Something draws on some ranks "
                "only, such as a sample for rank 0's log: let all ranks draw, or give it a generator of its own "
                "(torch.Generator().manual_seed(0))."
            )

    def check_now(self, update: int) -> None:
        """As `check`, in the middle of a window. Collective."""
        told = agree.gather(self.signature())
        self.check([sum(each for (each,) in told)], len(told), update)

    def _now(self) -> int:
        on_gpu = self._device.type == "cuda"
        state = torch.cuda.get_rng_state(self._device) if on_gpu else torch.default_generator.get_state()
        return rng.position(state)
