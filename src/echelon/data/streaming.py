"""Code of a StreamLoader's workers: each iterates once over the dataset, and gives micro-batches with the position after each."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from echelon.common.errors import DataError
from echelon.data.parts import Padding
from echelon.data.reader import ReadFailure
from echelon.data.workers import Board, said, seed_worker
from echelon.world import rng

__all__ = ["Share", "StreamPosition", "Streams"]


@dataclass(frozen=True)
class StreamPosition:
    """The position of a data rank in an epoch: before the micro-batch `position`, whose turn is `turn`."""

    position: int
    turn: int
    streams: tuple[Any, ...]  # state of each stream; None at the stream's beginning


@dataclass(frozen=True)
class Share:
    """What a data rank reads, and how; names as in StreamLoader.

    Args:
        size: samples per micro-batch.
        keep: keep a stream's last micro-batch, which may have fewer samples.
        pads: with "stride" and `keep`, end with padding where only other ranks have a last micro-batch.
        where: epoch and data rank, for messages.
        dp: (data rank, number of data ranks).
    """

    dataset: Iterable[Any]
    collate: Callable[[list[Any]], Any]
    shards: str | None
    size: int
    keep: bool
    pads: bool
    epoch: int
    where: str
    dp: tuple[int, int]


class Streams(IterableDataset[Any]):
    """This worker's stream: endless triples (whether there is a batch, batch, the stream's state after it)."""

    def __init__(self, share: Share, begin: StreamPosition, board: Board | None) -> None:
        self._share, self._begin, self._board = share, begin, board

    def __iter__(self) -> Iterator[Any]:
        streams = len(self._begin.streams)
        worker = self._board.worker if self._board is not None else 0
        # torch begins with worker 0, so worker 0 takes the stream whose turn it is.
        stream = (self._begin.turn + worker) % streams
        if self._share.shards == "stride":
            _reads_all()
        try:
            yield from self._batches(stream, streams)
        except DataError as error:
            if self._board is None:
                raise
            yield ReadFailure.of(error, self._board)

    def _batches(self, stream: int, streams: int) -> Iterator[Any]:
        state, index, count = self._begin.streams[stream], self._share.dp[0] * streams + stream, self._share.dp[1] * streams
        # The state of an ended stream says only that it has ended.
        ended = isinstance(state, dict) and state.get("ended", False)
        with self._drawing(index, -1):
            samples: Any = iter(()) if ended else self._samples(state, index, count)
        read = 0 if state is None else int(state["read"])
        while True:
            with self._drawing(index, read):
                batch = self._read(samples, read, index)
                read += len(batch)
                given = len(batch) == self._share.size or bool(batch and self._share.keep)
                collated = self._collated(batch, index, read) if given else None
                if not batch and self._is_awaited(samples, stream, read):
                    given, collated, samples = True, Padding(self._collated([samples.last], index, read)), iter(())
            # At its end a dataset's own state may point to its beginning, so it is not kept.
            more = {"own": self._state()} if len(batch) == self._share.size else {"ended": True}
            yield given, collated, {"read": read, **more}

    def _is_awaited(self, samples: Any, stream: int, read: int) -> bool:
        """Whether other ranks have one more batch in their streams of this number, which has ended."""
        is_one = isinstance(samples, _Strided) and self._share.pads
        return is_one and samples.others_have(stream, read, self._share.size)

    @contextlib.contextmanager
    def _drawing(self, index: int, read: int) -> Iterator[None]:
        """Context in which random draws depend on the stream's position, so that a restart draws the same again.

        In the rank's own process, the RNG states are restored afterwards, because training draws from them, too.
        """
        with rng.unchanged() if self._board is None else contextlib.nullcontext():
            seed_worker(self._share.epoch, index, read)
            yield

    def _read(self, samples: Iterator[Any], read: int, index: int) -> list[Any]:
        """The samples of a micro-batch; fewer at the stream's end."""
        batch: list[Any] = []
        try:
            for sample in samples:
                batch.append(sample)
                if self._board is not None:
                    self._board.reading(read + len(batch))
                if len(batch) == self._share.size:
                    break
        except Exception as error:
            raise DataError(
                f"sample {read + len(batch)} of stream {index}{self._share.where} could not be read: {said(error)}",
                sample=read + len(batch),
            ) from error
        return batch

    def _collated(self, batch: list[Any], index: int, read: int) -> Any:
        try:
            return self._share.collate(batch)
        except Exception as error:
            which = f"samples {read - len(batch)} to {read - 1} of stream {index}{self._share.where}"
            raise DataError(f"{which} could not be collated: {said(error)}") from error

    def _samples(self, state: dict[str, Any] | None, index: int, count: int) -> Iterator[Any]:
        dataset: Any = self._share.dataset
        if self._share.shards == "set_place":
            dataset.set_place(index, count)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self._share.epoch)
        own = state["own"] if state is not None else None
        if own is not None and hasattr(dataset, "load_state_dict"):
            dataset.load_state_dict(copy.deepcopy(own))
        iterator: Any = iter(dataset)
        if own is not None and not hasattr(dataset, "load_state_dict"):
            iterator.load_state_dict(copy.deepcopy(own))
        self._holder = dataset if hasattr(dataset, "state_dict") else iterator
        if self._share.shards != "stride" or count == 1:
            return iterator  # type: ignore[no-any-return]
        return _Strided(iterator, index, count, 0 if state is None else int(state["read"]))

    def _state(self) -> Any:
        """A copy of the dataset's state: it is pickled later, when the dataset may have advanced."""
        return copy.deepcopy(self._holder.state_dict()) if hasattr(self._holder, "state_dict") else None


def _reads_all() -> None:
    """In a worker: have a dataset that divides its samples between workers, as torch's pages advise, give all of them, since each
    stream keeps every count-th. Else only every count-th of a part would be read.
    """
    if (info := get_worker_info()) is not None:
        for name, value in (("id", 0), ("num_workers", 1)):
            object.__setattr__(info, name, value)  # frozen, but this process's own


class _Strided(Iterator[Any]):
    """Every `count`-th sample of a dataset, from number `index` on; never reads beyond the sample that it gives.

    Args:
        given: how many it has given before; the iterator is behind these.
    """

    def __init__(self, iterator: Iterator[Any], index: int, count: int, given: int) -> None:
        self._iterator, self._count, self.last = iterator, count, None
        self._next = index + given * count  # number of the sample to give
        self._read = self._next - count + 1 if given else 0  # samples that were read

    def __next__(self) -> Any:
        while self._read <= self._next:
            self.last = next(self._iterator)
            self._read += 1
        self._next += self._count
        return self.last

    def others_have(self, stream: int, given: int, size: int) -> bool:
        """Whether the first data rank, once the dataset has ended, has more batches of this size in its stream of this number."""
        most = -(-(self._read - stream) // self._count)
        return self._read > 0 and -(-most // size) > -(-given // size)
