"""The loader: the user sets the global batch, and each rank gets its share of it.

    epoch      positions 0 .. length - 1, permuted by `Order`
    global batch k   positions k * global_batch .. (k + 1) * global_batch - 1: one optimizer update
    micro-batch m of rank r   one of accumulation x dp_size nearly equal parts of it: one forward and backward

The last global batch of an epoch may be short. Its parts then differ by one sample at most. A part without samples is replaced
by a `Padding`, which is computed, so that every rank takes part in every collective, but has no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sized
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
from torch.utils.data import DataLoader, Dataset

from echelon.common.arguments import flags
from echelon.common.errors import LoaderError
from echelon.common.numbers import whole
from echelon.common.older_words import renames
from echelon.data import resume
from echelon.data.base import BaseLoader
from echelon.data.fingerprint import fingerprint as fingerprint_of
from echelon.data.options import LoaderOptions
from echelon.data.order import FORMULA, Order, SampleOrder
from echelon.data.page_locked import lockable, locks
from echelon.data.parts import Padding, share
from echelon.data.reader import Reader, ReadFailure
from echelon.data.views import Ordered
from echelon.data.workers import BROKEN, Board, base_generator, named, start_method

__all__ = ["Loader", "Padding", "share"]


class MapStyle(Protocol):
    """Samples by number: a list, a tensor, a user's class. (torch's Dataset does not promise a length.)"""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Loader(BaseLoader):
    """Batches of a map-style dataset, the same global batches for any number of ranks.

    Iterating gives this rank's micro-batches of one epoch; `len` is their number, equal on all ranks. After
    `load_state_dict` the first iteration resumes at the saved position.

    Args:
        dataset: has `__len__` and `__getitem__`; `__getitems__` is used if present. `Weighted` and `Mixture` have an order of
            their own.
        global_batch: samples per optimizer update over all ranks; must be divisible by ranks x accumulate.
        seed: seed of the order; must be the same on all ranks.
        shuffle: permute the samples, differently in every epoch.
        accumulate: micro-batches per update on each rank. None takes the number of the unit or `prepare`, else 1. Give it there,
            and here only for a TrainUnit of your own, which has no such argument.
        tail: "keep" the short last global batch, weighted by its size, or "drop" it.
        num_workers: number of processes that load batches; 0 loads in this process.
        collate_fn: list of samples -> batch.
        pin_memory: use page-locked host memory, so that copies to a GPU need not be waited for. None uses it if this process
            uses CUDA.
        options: further options: a LoaderOptions.
    Raises:
        UsageError: the global batch cannot be divided; too few samples: with tail="drop", fewer than one global batch.
        DataError: while iterating: a sample cannot be read, or a worker died; the message names them.
    """

    @renames(accumulation="accumulate")
    def __init__(
        self,
        dataset: Dataset[Any] | MapStyle,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        accumulate: int | None = None,
        tail: Literal["keep", "drop"] = "keep",
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        options: LoaderOptions | None = None,
    ) -> None:
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise LoaderError(
                f"dataset must be map-style, with __len__ and __getitem__, got {type(dataset).__name__}. "
                "For a dataset that can only be iterated over, use StreamLoader."
            )
        if isinstance(dataset, (str, bytes)) or (isinstance(dataset, Mapping) and 0 not in dataset):
            keys = f" of {', '.join(map(repr, list(dataset)[:5]))}. Choose one of them" if isinstance(dataset, Mapping) else ""
            raise LoaderError(f"dataset must be map-style, with samples 0, 1, 2, ..., got {type(dataset).__name__}{keys}.")
        super().__init__(global_batch, accumulate, tail, num_workers, collate_fn, pin_memory, options)
        flags(shuffle=shuffle, kind=LoaderError)
        seed = whole("seed", seed, kind=LoaderError)
        self.dataset = dataset
        options = options or LoaderOptions()
        self.accept_changes = frozenset(options.accept_changes)
        self._fingerprint: Any = options.fingerprint
        self.shuffle = shuffle
        self.order: SampleOrder = self._order(seed)
        self.keeps_seed = True  # False: the user gave no seed
        self._check_length()
        self.multiple = 1  # the number of samples is rounded down to a multiple of this
        self.fills_tail = False  # fill a short tail with samples of the batch before it; for evaluations only
        self.worker_init_fn: Callable[[int], Any] | None = None  # that of the torch DataLoader from which this loader was made
        self.start = 0  # the micro-batch at which the next iteration begins; only `seek` and `load_state_dict` set it
        self.position = 0
        # After a resume: the epoch, and the saved position in the saved run's micro-batches and in this loader's.
        self._resumed: tuple[int, tuple[int, int]] | None = None

    def _order(self, seed: int) -> SampleOrder:
        dataset = self.dataset
        if isinstance(dataset, Ordered):
            return dataset.order(seed, shuffle=self.shuffle)
        if not len(dataset):
            raise LoaderError(f"dataset must hold at least one sample, got an empty {type(dataset).__name__}.")
        return Order(len(dataset), seed, shuffle=self.shuffle)

    def _check_length(self) -> None:
        samples, global_batch = self.order.length, self.global_batch
        if samples < global_batch and self.tail == "drop":
            raise LoaderError(
                f"dataset must hold at least one global batch of {global_batch} samples, got {samples}. "
                f"Set global_batch to {samples} or less, or leave out tail='drop'."
            )

    def take_length(self) -> None:
        """At an epoch's beginning, take the dataset's length, which may have changed.

        Raises:
            UsageError: the dataset now holds too few samples.
        """
        if isinstance(self.dataset, Ordered) or len(self.dataset) == self.order.length:
            return
        self.order = self._order(self.order.seed)
        self._check_length()

    @property
    def samples(self) -> int:
        """Number of samples in an epoch, over all ranks, without those dropped at its end."""
        return self.order.length - self.order.length % (self.multiple if self.tail == "keep" else self.global_batch)

    @property
    def global_batches(self) -> int:
        """Optimizer updates per epoch."""
        whole, rest = divmod(self.samples, self.global_batch)
        return whole + (1 if rest else 0)

    @property
    def whole_batches(self) -> int:
        """Number of whole global batches: all except perhaps the last, or the last two."""
        return self.samples // self.global_batch - (1 if self._moved else 0)

    @property
    def _moved(self) -> int:
        """Number of samples moved from the last but one global batch to the last, so that each of its micro-batches has one."""
        rest, least = self.samples % self.global_batch, self.dp[1] * self.accumulation
        lacks = least - rest if self.fills_tail and 0 < rest < least else 0
        return lacks if self.samples > self.global_batch >= least + lacks else 0

    @property
    def pads(self) -> bool:
        """Whether the last global batch is too short for every micro-batch of every rank to hold a sample."""
        return 0 < self._tail_samples < self.dp[1] * self.accumulation

    @property
    def is_uneven(self) -> bool:
        """Whether the micro-batches of the last global batch differ in size, so that their mean needs weights."""
        return self._tail_samples % (self.dp[1] * self.accumulation) > 0

    @property
    def _tail_samples(self) -> int:
        return self.samples % self.global_batch + self._moved

    def __len__(self) -> int:
        return self.global_batches * self.accumulation

    def batches_left(self) -> int:
        """Number of micro-batches that the next iteration will give: fewer than `len` after resuming within an epoch."""
        return len(self) - self.start

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the loops call it. A different epoch starts from its beginning."""
        if epoch != self.epoch:
            self.epoch, self.start, self.position = epoch, 0, 0
        if not self.start:
            self.take_length()

    def seek(self, position: int) -> int:
        """Begin the next iteration, and only that one, after `position` micro-batches; at the epoch's end it gives none.

        Returns:
            `position`; after resuming with another global batch, the corresponding position of this loader.
        """
        # A unit with windows recounts its position after a restore, one without does not: accept both.
        if self._resumed is not None and self._resumed[0] == self.epoch and position in self._resumed[1]:
            return self.start
        self.start = self.position = min(position, len(self))
        return position

    def positions_of(self, micro: int, dp_rank: int) -> tuple[int, int]:
        """Start and stop position of a micro-batch of one data-parallel rank; an empty range if it is padding."""
        batch, m = divmod(micro, self.accumulation)
        start, stop = batch * self.global_batch, min((batch + 1) * self.global_batch, self.samples)
        if batch >= self.whole_batches and (moved := self._moved):
            start, stop = (start, stop - moved) if batch == self.whole_batches else (start - moved, stop)
        # Divided micro-batch by micro-batch over the ranks, so that a short batch leaves late micro-batches empty, not a rank.
        low, high = share(stop - start, m * self.dp[1] + dp_rank, self.accumulation * self.dp[1])
        return start + low, start + high

    def __iter__(self) -> Iterator[Any]:
        dp_rank, _ = self.dp
        first, self.start, self._resumed = self.start, 0, None
        self.position = first
        shares = _Shares(self, first, len(self), dp_rank)
        words = (self.order.seed, self.epoch, dp_rank)
        board = Board(self.num_workers, self._where) if self.num_workers else None
        reader = Reader(self.dataset, self.collate_fn, self._where, words, board)
        locking = locks(self.pin_memory)
        loader: DataLoader[Any] = DataLoader(
            reader,  # type: ignore[arg-type]
            batch_sampler=shares,  # type: ignore[arg-type]
            num_workers=self.num_workers,
            collate_fn=partial(lockable, reader.collate) if locking else reader.collate,
            pin_memory=locking or bool(self.pin_memory),
            worker_init_fn=partial(_begin_worker, board, self.worker_init_fn) if board else None,
            generator=base_generator(*words),
            timeout=self.options.timeout_s if board else 0,
            multiprocessing_context=start_method() if board else None,
        )
        batches = board.started(loader) if board else iter(loader)
        try:
            for micro, batch in enumerate(batches, first):
                if locking:
                    batch = batch.data
                if type(batch) is ReadFailure:
                    raise batch.error()
                self.position = micro + 1
                yield Padding(batch) if shares.is_empty(micro) else batch
        except (RuntimeError, *BROKEN) as error:
            better = named(error, board, (self.position - first) % max(1, self.num_workers), self.options.timeout_s)
            if better is error:
                raise
            raise better from error
        finally:
            del batches  # ends the workers, even if an error's traceback keeps this frame alive
            if board is not None:
                board.done()

    def state_dict(self) -> dict[str, Any]:
        """The position of the latest iteration: a few numbers."""
        return self.state_at(self.position)

    def state_at(self, position: int, epoch: int | None = None) -> dict[str, Any]:
        """The state after `position` micro-batches of an epoch, by default the current one. For a reader that is ahead of the
        micro-batches that were used.
        """
        if self._fingerprint is None:  # computed once in a run, and only if the run is saved
            self._fingerprint = fingerprint_of(self.dataset, in_worker=self.num_workers > 0)
        return {
            "epoch": self.epoch if epoch is None else epoch,
            "position": position,
            "accumulation": self.accumulation,
            "global_batch": self.global_batch,
            "seed": self.order.seed,
            "samples": self.order.length,
            "shuffle": self.shuffle,
            "tail": self.tail,
            "order": f"{FORMULA} {self.order.identity}".rstrip(),
            "fingerprint": self._fingerprint,
        }

    def take_seed(self, state: object) -> None:
        """Take the saved seed if the user gave none: the default, torch's seed, may be a new one in each run."""
        seed = state.get("seed") if isinstance(state, Mapping) else None
        if not self.keeps_seed and type(seed) is int:
            self.order = self._order(seed)

    def load_state_dict(self, state: dict[str, Any], *, accept: Collection[str] = ()) -> None:
        """Resume from a saved state, also with another number of ranks or another accumulation.

        Args:
            accept: further changes to accept, besides the loader's own `accept_changes`.
        Raises:
            UsageError: the data, its order or the global batch are not those of the saved run. A table lists the changes and
                which of them are harmless.
        """
        self.take_seed(state)
        resume.check_same(state, self.state_dict(), {*self.accept_changes, *accept})
        saved, accumulation = int(state["position"]), int(state["accumulation"])
        batches, rest = divmod(saved, accumulation)
        if rest and accumulation != self.accumulation:
            raise LoaderError(
                f"the loader was saved in the middle of an update ({rest} of {accumulation} micro-batches): "
                f"resume it with accumulate={accumulation}."
            )
        counted = batches * self.accumulation + rest
        if state["global_batch"] != self.global_batch:
            # Rounded down: rather repeat some samples than miss some.
            batches, rest = batches * int(state["global_batch"]) // self.global_batch, 0
        self.epoch, self.start = int(state["epoch"]), min(batches * self.accumulation + rest, len(self))
        self.position, self._resumed = self.start, (self.epoch, (saved, counted))


def _begin_worker(board: Board, own: Callable[[int], Any] | None, worker: int) -> None:
    board.begin(worker)
    if own is not None:
        own(worker)


# Number of micro-batches whose samples are computed together: a call costs 0.1 ms even for a few samples.
_AT_ONCE = 128


class _Shares:
    """The batch sampler of one rank and epoch: gives each micro-batch's number and its samples."""

    def __init__(self, loader: Loader, first: int, last: int, dp_rank: int) -> None:
        self._loader, self._first, self._last, self._dp_rank = loader, first, last, dp_rank
        self._epoch = loader.epoch  # kept, because an evaluation during this iteration may use the same loader
        self._alike = loader.whole_batches * loader.accumulation

    def is_empty(self, micro: int) -> bool:
        if micro < self._alike:
            return False
        start, stop = self._loader.positions_of(micro, self._dp_rank)
        return start == stop

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        loader, whole = self._loader, self._alike
        for begin in range(self._first, min(whole, self._last), _AT_ONCE):
            yield from self._whole(begin, min(begin + _AT_ONCE, whole, self._last))
        for micro in range(max(self._first, whole), self._last):
            positions = np.arange(*loader.positions_of(micro, self._dp_rank), dtype=np.int64)
            # Any sample will do for padding: it is computed like the others and has no weight.
            yield micro, loader.order.at(self._epoch, positions).tolist() or [0]

    def _whole(self, begin: int, end: int) -> Iterator[tuple[int, list[int]]]:
        """Micro-batches of whole global batches, which all have the same size."""
        loader = self._loader
        size = loader.global_batch // (loader.accumulation * loader.dp[1])
        batches, parts = np.divmod(np.arange(begin, end), loader.accumulation)
        starts = batches * loader.global_batch + (parts * loader.dp[1] + self._dp_rank) * size  # as in `positions_of`
        positions = starts[:, None] + np.arange(size)
        samples = loader.order.at(self._epoch, positions.ravel()).reshape(-1, size)
        return zip(range(begin, end), samples.tolist(), strict=True)
