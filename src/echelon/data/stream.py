"""The loader of iterable datasets. It resumes as exactly as the dataset's own state allows.

    stream    one iteration over the dataset: one for each worker of each data rank, or for each data rank without workers
    turn t    micro-batch t of a data rank comes from its stream t % streams; a stream that has ended is skipped

Unlike with a map-style dataset, the global batches depend on the number of ranks and workers. So a run resumes only with the
same numbers of both.
"""

from __future__ import annotations

import base64
import io
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from echelon.common.errors import LoaderError
from echelon.common.older_words import renames
from echelon.data.base import BaseLoader
from echelon.data.lossy import shuffle_buffer
from echelon.data.options import StreamOptions
from echelon.data.page_locked import Lockable, locked, locks
from echelon.data.reader import ReadFailure
from echelon.data.resume import called
from echelon.data.streaming import Share, StreamPosition, Streams
from echelon.data.workers import BROKEN, Board, base_generator, named, start_method
from echelon.world import agree

__all__ = ["StreamLoader", "is_divided", "of_all_ranks"]

logger = logging.getLogger(__name__)


def is_divided(dataset: Any) -> bool:
    """Whether it is an iterable dataset of the library `datasets` that is divided between the ranks already."""
    return getattr(dataset, "_distributed", None) is not None


class StreamLoader(BaseLoader):
    """Batches of an iterable dataset, with the interface of `Loader`.

    The position is the dataset's own state: the dataset, or its iterator, has `state_dict` and `load_state_dict`; `iter(dataset)`
    starts over, except after `load_state_dict`. A run then resumes exactly, with the same number of data ranks, workers and
    micro-batches. Without these methods the position in an epoch is unknown, and resuming within an epoch is refused.

    Args:
        dataset: a torch IterableDataset, or any iterable that can be iterated over again for the next epoch. Its
            `set_epoch(epoch)` is called if it has one.
        shards: how the streams get different samples. "set_place": the dataset's `set_place(index, count)` is called with the
            stream's number and the number of streams; "stride": each stream reads all samples and keeps every count-th;
            "itself": the dataset divides its samples. Default: "set_place" if the dataset has that method, "itself" for a dataset
            that `split_dataset_by_node` of the library `datasets` has divided. Required if there are two streams or more.
        tail: "drop" or "keep" the samples that do not fill a stream's last micro-batch.
        global_batch, accumulate, num_workers, collate_fn, pin_memory: as in `Loader`.
        options: further options: a StreamOptions.
    Raises:
        UsageError: `shards` is missing, or a state was saved with other numbers of ranks or workers.
        DataError: while iterating: the dataset raised, or a worker died; the message names it.
    """

    _options = StreamOptions
    _fixed_ranks = True

    @renames(accumulation="accumulate")
    def __init__(
        self,
        dataset: Iterable[Any],
        global_batch: int,
        *,
        accumulate: int | None = None,
        tail: Literal["keep", "drop"] = "drop",
        shards: Literal["set_place", "stride", "itself"] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        options: StreamOptions | None = None,
    ) -> None:
        super().__init__(global_batch, accumulate, tail, num_workers, collate_fn, pin_memory, options)
        if not hasattr(dataset, "__iter__") or isinstance(dataset, (type, str, bytes)):
            raise LoaderError(f"dataset must be iterable, got {type(dataset).__name__}.")
        if shards not in (None, "set_place", "stride", "itself"):
            raise LoaderError(f"shards must be 'set_place', 'stride' or 'itself', got {shards!r}.")
        if shards == "set_place" and not hasattr(dataset, "set_place"):
            raise LoaderError(
                f"shards='set_place' needs a dataset with set_place(index, count), which {type(dataset).__name__} lacks. "
                "Use shards='stride' or 'itself'."
            )
        divided = is_divided(dataset)
        if divided and shards == "stride":
            raise LoaderError(
                "shards must be 'itself' for a dataset that split_dataset_by_node has divided between the ranks, got 'stride': "
                "each rank would skip most of its share."
            )
        default = "itself" if divided else "set_place" if hasattr(dataset, "set_place") else None
        self.dataset, self.shards = dataset, shards or default
        self.pads = False  # with "stride" and "keep", ranks without a last micro-batch get padding; for loops that weigh it
        self._loaded: dict[str, Any] | None = None
        self._begin = self._fresh
        # The latest two positions, because a reader may be one micro-batch ahead of the loop.
        self._latest: deque[StreamPosition] = deque([self._fresh], maxlen=2)

    @property
    def _fresh(self) -> StreamPosition:
        return StreamPosition(0, 0, (None,) * max(1, self.num_workers))

    @property
    def start(self) -> int:
        """The micro-batch at which the next iteration begins."""
        return self._begin.position

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the loops call it. A different epoch starts from its beginning."""
        if epoch != self.epoch:
            self.epoch, self._begin, self._loaded = epoch, self._fresh, None
            self._latest = deque([self._fresh], maxlen=2)

    def seek(self, position: int) -> int:
        """Begin the next iteration after `position` micro-batches: the stream's current position, or the epoch's beginning.

        Raises:
            UsageError: the stream is at another position.
        """
        self._resolve()
        stands = [self._fresh, *self._latest]
        position_at = next((stand for stand in stands if stand.position == position), None)
        if position_at is None:
            raise LoaderError(
                f"training resumes after micro-batch {position} of epoch {self.epoch}, but the stream is at "
                f"{self._latest[-1].position}. Restore the loader together with the unit: train_dataloader=."
            )
        self._begin = position_at
        return position

    def __iter__(self) -> Iterator[Any]:
        self._resolve()
        begin, self._begin = self._begin, self._fresh
        self._check(begin)
        streams = len(begin.streams)
        self._latest = deque([begin], maxlen=2)
        states, turn, position, ended = list(begin.streams), begin.turn, begin.position, 0
        board = Board(self.num_workers, self._where) if self.num_workers else None
        made = Streams(self._share(), begin, board)
        locking = locks(self.pin_memory)
        batches = iter(made) if board is None else board.started(self._in_workers(made, board, locking))
        try:
            while ended < streams:  # until every stream has ended in one round
                item = next(batches)
                if locking:
                    item = item.data if board is not None else locked(item)
                if isinstance(item, ReadFailure):
                    raise item.error()
                given, batch, states[turn % streams] = item
                turn += 1
                if not given:
                    ended += 1
                    continue
                ended, position = 0, position + 1
                self._latest.append(StreamPosition(position, turn, tuple(states)))
                yield batch
        except (RuntimeError, *BROKEN) as error:
            better = named(error, board, (turn - begin.turn) % streams, self.options.timeout_s)
            if better is error:
                raise
            raise better from error
        finally:
            del batches  # ends the workers, even if an error's traceback keeps this frame alive
            if board is not None:
                board.done()

    def _share(self) -> Share:
        return Share(
            dataset=self.dataset,
            collate=self.collate_fn,
            shards=self.shards,
            size=self.global_batch // (self.dp[1] * self.accumulation),
            keep=self.tail == "keep",
            pads=self.tail == "keep" and self.pads,
            epoch=self.epoch,
            where=self._where,
            dp=self.dp,
        )

    def inexact(self) -> str | None:
        """Why a run cannot resume exactly from the latest iteration's position; None if it can."""
        kind = type(self.dataset).__name__
        if _has_no_state(self._latest[-1]):
            return f"{kind} has no state: a run cannot resume from here. {_REMEDY}"
        buffer = shuffle_buffer(self.dataset)
        if buffer and self._latest[-1].position:
            return _loses(kind, buffer)
        return None

    def _check(self, begin: StreamPosition) -> None:
        kind, count = type(self.dataset).__name__, self.dp[1] * len(begin.streams)
        if count > 1 and self.shards is None:
            raise LoaderError(
                f"{kind} has no set_place(index, count), so all {count} streams (data ranks x workers) would read the same "
                "samples. Give it one, or choose shards='stride' or shards='itself'."
            )
        if _has_no_state(begin):
            raise LoaderError(
                f"{kind} cannot resume in the middle of an epoch: neither it nor its iterator has state_dict and "
                f"load_state_dict. {_REMEDY}"
            )
        if begin.position and (buffer := shuffle_buffer(self.dataset)):
            logger.warning("%s", _loses(kind, buffer))

    def _in_workers(self, made: Streams, board: Board, locking: bool) -> DataLoader[Any]:
        return DataLoader(
            made,
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=Lockable if locking else _as_it_is,
            pin_memory=locking or bool(self.pin_memory),
            worker_init_fn=board.begin,
            generator=base_generator(self.epoch, self.dp[0]),
            timeout=self.options.timeout_s,
            multiprocessing_context=start_method(),
        )

    def state_dict(self) -> dict[str, Any]:
        """The position of this data rank's latest iteration. Each data rank has its own; a checkpoint holds all of them."""
        return self.state_at(self._latest[-1].position)

    def state_at(self, position: int) -> dict[str, Any]:
        """The state after `position` micro-batches of this epoch; only the latest two positions are known."""
        if self._loaded is not None:
            return self._loaded
        stand = next(stand for stand in (*self._latest, self._fresh) if stand.position == position)
        return {
            "epoch": self.epoch,
            "position": position,
            **self._division(),
            # This data rank's part only; `of_all_ranks` joins all parts.
            "ranks": {str(self.dp[0]): {"turn": stand.turn, "streams": list(stand.streams)}},
        }

    def _division(self) -> dict[str, int]:
        """How the samples are divided: only the same division can continue a stream."""
        return {
            "global_batch": self.global_batch,
            "accumulation": self.accumulation,
            "dp_size": self.dp[1],
            "workers": self.num_workers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state. It is checked later, once the loop has set this rank's data-parallel rank."""
        self._loaded, self.epoch = state, int(state["epoch"])

    def _resolve(self) -> None:
        """Take this data rank's part of a loaded state."""
        if self._loaded is None:
            return
        state, (dp_rank, _), now = self._loaded, self.dp, self._division()
        changed = [f"{called(name)} was {state[name]}, is {value}" for name, value in now.items() if state[name] != value]
        own_state = state["ranks"].get(str(dp_rank))
        if changed or own_state is None:
            raise LoaderError(
                f"streams of {type(self.dataset).__name__} cannot resume: "
                f"{'; '.join(changed) or f'the state holds nothing of data rank {dp_rank}'}. A stream's position cannot "
                "be split differently. Use the same numbers, or do not restore the loader and start the epoch again. "
                "A map-style dataset in a Loader has no such limit."
            )
        self._begin = StreamPosition(int(state["position"]), int(own_state["turn"]), tuple(own_state["streams"]))
        self._latest, self._loaded = deque([self._begin], maxlen=2), None


_REMEDY = "Give it, or its iterator, state_dict and load_state_dict, or save at the end of epochs."


def _loses(kind: str, buffer: int) -> str:
    return (
        f"{kind} shuffles through a buffer, which is not in its state: a run that resumes within an epoch misses up to {buffer} "
        "samples of each stream in that epoch. Shuffle only its shards (buffer_size=1), or save at the end of epochs."
    )


def _has_no_state(stand: StreamPosition) -> bool:
    return any(s is not None and not s.get("ended") and s["own"] is None for s in stand.streams)


def of_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """A state that holds every data rank's part. Collective."""
    buffer = io.BytesIO()
    torch.save(state["ranks"], buffer)
    parts = [torch.load(io.BytesIO(base64.b64decode(part)), weights_only=True) for part in agree.gather(_text(buffer))]
    return {**state, "ranks": {rank: own for part in parts for rank, own in part.items()}}


def _text(buffer: io.BytesIO) -> str:
    return base64.b64encode(buffer.getvalue()).decode()


def _as_it_is(item: Any) -> Any:
    return item
