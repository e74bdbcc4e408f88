"""The loop's iterator over a loader: moves batches to the device, one ahead on a GPU, and gives each batch's position.

It belongs to one epoch, so a batch read ahead cannot leak into another. It counts the batches that were used, so a checkpoint
never holds the position of a batch that was only read ahead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon.common.errors import EchelonError
from echelon.data.chain import Chain
from echelon.data.loader import Loader
from echelon.data.parts import Padding
from echelon.data.replayed import Replayed, with_state
from echelon.data.stream import StreamLoader, of_all_ranks
from echelon.world import rng
from echelon.world.device import record_stream

__all__ = ["NO_STEP", "Feed", "Step", "known_length", "restored_state", "samples_by_batch"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_END = object()


class Step(NamedTuple, Generic[T]):
    """A batch, and its position in the epoch.

    Args:
        batch: the batch, on the device.
        is_last: whether it is the epoch's last, or the last that a limit allows.
        is_padding: whether it must be computed but has no weight.
        position: number of batches handed out, including this one.
        samples: number of samples in the batch; None if the loader does not say.
    """

    batch: T
    is_last: bool
    is_padding: bool
    position: int
    samples: int | None = None


# Before the first batch of an epoch, and after its end.
NO_STEP: Step[Any] = Step(None, False, False, 0)


def known_length(loader: Iterable[Any]) -> int | None:
    """Number of batches that an iteration will give; None if unknown, as with an IterableDataset."""
    if isinstance(loader, Chain):
        of_each = [(known_length(each), limit) for each, limit in zip(loader.loaders, loader.limits, strict=True)]
        lengths = [length if limit is None else min(length, limit) for length, limit in of_each if length is not None]
        return sum(lengths) if len(lengths) == len(of_each) else None
    if isinstance(loader, Loader):
        return loader.batches_left()
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None  # its len is a guess, which workers can make wrong
    if isinstance(loader, Sized):
        try:
            return len(loader)
        except TypeError:  # a DataLoader over a sampler without a length
            return None
    return None


def _sizes(loader: Any, start: int) -> tuple[int | None, float, Callable[[int], int | None]]:
    """Samples per batch for the first batches of this iteration, the number of these batches, and a function that gives the
    samples of a later batch by its number from 1.

    Args:
        start: batches of the epoch that were used before.
    """
    if isinstance(loader, Chain) and len(loader.loaders) == 1:
        loader = loader.loaders[0]
    if isinstance(loader, (Loader, StreamLoader)):
        usual = loader.global_batch // (loader.dp[1] * loader.accumulation)
        if isinstance(loader, StreamLoader):  # its last batches may be shorter
            return usual, math.inf, _unknown
        alike = loader.whole_batches * loader.accumulation - start
        return usual, alike, partial(_of_tail, loader, start)
    size = loader.batch_size if isinstance(loader, DataLoader) else None
    if size is None or isinstance(loader.dataset, IterableDataset):
        return size, math.inf, _unknown
    samples = known_length(loader.sampler)
    return size, math.inf if samples is None else samples // size - start, lambda used: (samples or 0) % size


def samples_by_batch(loader: Any) -> Callable[[int], int | None]:
    """A function from a batch's number in this iteration, from 1, to its number of samples; None if the loader does not say."""
    first, alike, later = _sizes(loader, loader.start if isinstance(loader, (Loader, StreamLoader)) else 0)
    return lambda used: first if used <= alike else later(used)


def _of_tail(loader: Loader, start: int, used: int) -> int:
    low, high = loader.positions_of(start + used - 1, loader.dp[0])
    return high - low


def _unknown(used: int) -> None:
    return None


def restored_state(loader: Any) -> dict[str, Any] | None:
    """The state of a loader that was not read since it was restored; None for a loader without state. Every rank calls it."""
    if isinstance(loader, StreamLoader):
        return of_all_ranks(loader.state_dict())
    return _state_of(with_state(loader))


def _state_of(loader: Any) -> dict[str, Any] | None:
    state: dict[str, Any] | None = loader.state_dict() if hasattr(loader, "state_dict") else None
    return state


class Feed(Iterator[Step[Any]]):
    """Iterates over one epoch of a loader; gives a Step for each batch.

    Args:
        loader: any iterable; a DataLoader whose position will be saved is given as a `Replayed`.
        limit: use at most this many batches.
        move: moves a batch to the device; None leaves it where it is.
        stream: side stream for the copies; with it, one batch is read and copied ahead.
        resumed: number of batches of the epoch after which the loader resumes by its own state. A `Replayed` has as many batches
            less. Of others the length is still that of a whole epoch: without `stream`, nothing is read ahead while batches of
            that length remain, so that random numbers are drawn in the same order as without the interruption. After that, one
            batch is read ahead, to notice the loader's end.
        read: takes a batch from the loader's iterator; a timer may wrap it.
    Attributes:
        used: number of batches handed out.
        length: number of batches of the loader; None if unknown before iterating.
        total: number of batches that `limit` allows; None if unknown before iterating.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        limit: int | None = None,
        move: Callable[[Any, bool], Any] | None = None,
        stream: torch.cuda.Stream | None = None,
        resumed: int = 0,
        read: Callable[..., Any] = next,
    ) -> None:
        self._with_state, replays = loader, isinstance(loader, Replayed)
        loader = loader.loader if isinstance(loader, Replayed) else loader
        self._loader, self._limit, self._move, self._stream, self._take = loader, limit, move, stream, read
        self._start = loader.start if isinstance(loader, (Loader, StreamLoader)) else 0
        self._epoch = loader.epoch if isinstance(loader, Loader) else 0
        length = known_length(loader)
        self.length = length if not resumed else length - resumed if replays and length is not None else None
        self._expected = length - resumed if resumed and length is not None else 0
        total = self.length if limit is None else (limit if self.length is None else min(limit, self.length))
        self.total = total
        # Without a length, reading ahead is the way to notice the last batch.
        self._ahead = stream is not None or self.length is None
        before = rng.states() if resumed else None
        self._iterator = iter(self._with_state)
        if before is not None:
            rng.put_back(before)  # an iterator draws at its beginning; the restored RNG state is from after that
        self._next: Any = None
        self._state_before: Any = None
        self.used = 0
        self._samples, self._alike, self._samples_at = _sizes(loader, self._start + resumed)

    def __next__(self) -> Step[Any]:
        if self.total is not None and self.used >= self.total:
            self._end()
            raise StopIteration
        if not self._ahead:
            try:
                batch = self._take(self._iterator)
            except StopIteration:
                raise EchelonError(
                    f"the loader has length {self.length} but gave only {self.used} batches: its __len__ is wrong."
                ) from None
            self.used = used = self.used + 1
            samples = self._samples if used <= self._alike else self._samples_at(used)
            padding = isinstance(batch, Padding)
            if padding:
                batch = batch.batch
            return Step(batch if self._move is None else self._move(batch, False), used == self.total, padding, used, samples)
        return self._next_ahead()

    def end(self, after: int) -> None:
        """Give no further batch, even if there is one, and count `after` batches as used."""
        self.used = self.total = after
        self._next = _END

    def _end(self) -> None:
        """Let torch's iterator run to its end, as `for` does: a sampler may draw from its generator there.

        Not for other iterators: one that goes on beyond its length would lose a batch.
        """
        is_whole = self.length is not None and (self._limit is None or self._limit > self.length)
        if isinstance(self._loader, DataLoader) and is_whole and next(self._iterator, _END) is not _END:
            logger.warning(
                "the DataLoader has more batches than its length, %s, and the others are dropped: its sampler's __len__ is wrong",
                self.length,
            )

    def _next_ahead(self) -> Step[Any]:
        if self._next is None:
            self._next = self._read()
        current = self._next
        if current is _END:
            raise StopIteration
        batch, padding = current
        self.used += 1
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            record_stream(batch, torch.cuda.current_stream())
        if self.used == self.total:
            self._next = _END
        elif self.used < self._expected and self._stream is None:
            self._next = None
        else:
            self._next = self._read()
        samples = self._samples if self.used <= self._alike else self._samples_at(self.used)
        return Step(batch, self._next is _END, padding, self.used, samples)

    def _read(self) -> Any:
        """The next batch and whether it is padding; or `_END`."""
        if not isinstance(self._loader, (Loader, StreamLoader)):
            self._state_before = _state_of(self._with_state)
        batch = self._take(self._iterator, _END)
        if batch is _END:
            return _END
        padding = False
        if isinstance(batch, Padding):
            batch, padding = batch.batch, True
        if self._move is not None:
            if self._stream is not None:
                with torch.cuda.stream(self._stream):
                    batch = self._move(batch, True)
            else:
                batch = self._move(batch, False)
        return batch, padding

    def loader_state(self) -> dict[str, Any] | None:
        """The loader's state after the batches that were used; None for a loader without state. Every rank calls it."""
        if isinstance(self._loader, Loader):
            return self._loader.state_at(self._start + self.used, self._epoch)
        if isinstance(self._loader, StreamLoader):
            return of_all_ranks(self._loader.state_at(self._start + self.used))
        if self._ahead and self._next is not None and self._next is not _END:
            return self._state_before  # type: ignore[no-any-return]
        return _state_of(self._with_state)
