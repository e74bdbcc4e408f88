"""Loaders in the order of a torch sampler or batch sampler.

Each epoch is drawn whole when it begins, on all ranks alike: from RNGs that are seeded by (seed, epoch), after the sampler's own
`set_epoch`. So a sampler is given as in one process, and a resumed run draws the same samples on any number of ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Iterator
from functools import cached_property
from math import lcm
from typing import Any

import numpy as np
import torch

from echelon.common.errors import LoaderError
from echelon.data.loader import Loader
from echelon.data.order import Indices, Positions
from echelon.data.parts import share
from echelon.world import rng

__all__ = ["BatchedLoader", "SampledLoader"]


class _Drawn:
    """The order of a sampler: a SampleOrder. Keeps the latest epoch.

    Args:
        batches: the sampler draws lists of samples.
    """

    def __init__(self, sampler: Any, seed: int, *, batches: bool = False) -> None:
        self._sampler, self._batches = sampler, batches
        self.seed, self.length, self.identity = seed, len(sampler), f"sampler {type(sampler).__qualname__}"
        self._latest: tuple[int, Indices, Indices] | None = None

    def at(self, epoch: int, positions: Positions) -> Indices:
        return self._of(epoch)[0][positions]

    def bounds(self, epoch: int) -> Indices:
        """Positions at which batches begin, and the end of the last; (batches + 1,)."""
        return self._of(epoch)[1]

    @cached_property
    def largest(self) -> int:
        """Samples in the largest batch of the first epoch."""
        return int(np.diff(self.bounds(0)).max(initial=1))

    def checksum(self, epoch: int) -> int:
        samples, bounds = self._of(epoch)
        return zlib.crc32(bounds.tobytes(), zlib.crc32(samples.tobytes()))

    def _of(self, epoch: int) -> tuple[Indices, Indices]:
        if self._latest is None or self._latest[0] != epoch:
            self._latest = (epoch, *self._draw(epoch))
        return self._latest[1:]

    def _draw(self, epoch: int) -> tuple[Indices, Indices]:
        """
        Raises:
            UsageError: the sampler draws another number than its length, or something else than numbers of samples.
        """
        with _seeded(list(_parts(self._sampler)), (self.seed + epoch) % 2**32, epoch):
            # An endless sampler would never come to its end.
            drawn = list(itertools.islice(self._sampler, self.length + 1))
        if len(drawn) != self.length:
            more = "more" if len(drawn) > self.length else len(drawn)
            raise LoaderError(f"{self.identity} must draw as many as its length, {self.length}, got {more} in epoch {epoch}.")
        try:
            sizes = [len(batch) for batch in drawn] if self._batches else [1] * len(drawn)
            samples = np.fromiter(itertools.chain.from_iterable(drawn) if self._batches else drawn, dtype=np.int64)
        except (TypeError, ValueError) as error:
            what = "lists of numbers" if self._batches else "numbers"
            raise LoaderError(f"{self.identity} must draw {what} of samples, got {drawn[0]!r}: {error}.") from None
        return samples, np.cumsum([0, *sizes], dtype=np.int64)


def _parts(sampler: Any) -> Iterator[Any]:
    """The sampler, and the samplers that it draws from."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


@contextlib.contextmanager
def _seeded(parts: list[Any], seed: int, epoch: int) -> Iterator[None]:
    """Context with all RNGs seeded, also the samplers' own, and with the epoch told to them. RNG states are put back."""
    own = [each for part in parts if isinstance(each := getattr(part, "generator", None), torch.Generator)]
    states = [each.get_state() for each in own]
    with rng.unchanged():
        rng.seed(seed)
        for each in own:
            each.manual_seed(seed)
        for part in parts:
            if callable(tell := getattr(part, "set_epoch", None)):
                tell(epoch)
        try:
            yield
        finally:
            for each, state in zip(own, states, strict=True):
                each.set_state(state)


class SampledLoader(Loader):
    """A Loader in the order of a sampler over all ranks' samples. The sampler has a length, and may draw it anew in each epoch.

    Args:
        sampler: draws numbers of samples, in each epoch as many as its length.
        global_batch, options: as in `Loader`.
    Attributes:
        in_turn: epochs are drawn one after another from 0 on.
    """

    order: _Drawn

    def __init__(self, dataset: Any, sampler: Any, global_batch: int, **options: Any) -> None:
        self.sampler, self.in_turn = sampler, True
        super().__init__(dataset, global_batch, **options)

    def _order(self, seed: int) -> _Drawn:
        return _Drawn(self.sampler, seed)

    def take_length(self) -> None:
        if len(self.sampler) != self.order.length:
            self.order = self._order(self.order.seed)
            self._check_length()

    def checksum(self) -> int:
        """Checksum of this epoch's order, to compare between ranks: they must draw alike."""
        return self.order.checksum(self.epoch)

    def load_state_dict(self, state: dict[str, Any], **options: Any) -> None:
        super().load_state_dict(state, **options)
        if self.in_turn and not type(self.sampler).__module__.startswith("torch."):
            for epoch in range(self.epoch):  # a sampler with an RNG or a count of its own gets to where it was
                self.order.at(epoch, np.empty(0, dtype=np.int64))


class BatchedLoader(SampledLoader):
    """A Loader over the batches of a batch sampler, of any sizes. Padding follows the last if it does not complete an update.

    Args:
        sampler: draws lists of numbers of samples.
        together: how many batches the ranks take at once. They share a single one; of as many as there are ranks, each takes one.
        options: as in `Loader`. An update has `accumulate` times as many batches as are taken at once.
    """

    def __init__(self, dataset: Any, sampler: Any, together: int = 1, **options: Any) -> None:
        self.together = together
        super().__init__(dataset, sampler, 1, **options)

    def _order(self, seed: int) -> _Drawn:
        return _Drawn(self.sampler, seed, batches=True)

    def _check_length(self) -> None: ...

    def _check_divides(self, ranks: int) -> None: ...

    def _divisible(self) -> int:
        return lcm(self.dp[1], *range(1, 33))  # by every number of ranks that may be left

    def split(self, accumulation: int, *, shares: int) -> None:
        raise LoaderError("bit-equal training must have batches of one size, got a batch sampler. Give a sampler and batch_size.")

    @property
    def global_batch(self) -> int:
        """The most samples of an update."""
        return self.order.largest * self.together * (self.accumulation // self._times)

    @property
    def samples(self) -> int:
        return int(self.order.bounds(self.epoch)[-1])

    @property
    def global_batches(self) -> int:
        batches = len(self.order.bounds(self.epoch)) - 1
        return -(-batches // (self.together * (self.accumulation // self._times)))

    @property
    def whole_batches(self) -> int:
        return 0  # each micro-batch has a size of its own

    @property
    def pads(self) -> bool:
        return min(self._sizes()) == 0

    @property
    def is_uneven(self) -> bool:
        return len(self._sizes()) > 1

    def _sizes(self) -> set[int]:
        """The sizes of all ranks' micro-batches in this epoch."""
        spans = (self.positions_of(micro, rank) for micro in range(len(self)) for rank in range(self.dp[1]))
        return {stop - start for start, stop in spans}

    def positions_of(self, micro: int, dp_rank: int) -> tuple[int, int]:
        bounds, (taken, part) = self.order.bounds(self.epoch), divmod(micro, self._times)
        first, last = (min(each * self.together, len(bounds) - 1) for each in (taken, taken + 1))
        part, parts = part * self.dp[1] + dp_rank, self._times * self.dp[1]
        if self.together % parts == 0:  # whole batches
            each = self.together // parts
            first, last = min(first + part * each, last), min(first + (part + 1) * each, last)
            return int(bounds[first]), int(bounds[last])
        low, high = share(int(bounds[last] - bounds[first]), part, parts)
        return int(bounds[first]) + low, int(bounds[first]) + high
