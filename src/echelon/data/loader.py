"""The loader: the user sets the global batch, and each rank gets its share of it.

    epoch      positions 0 .. length - 1, permuted by `Order`
    global batch k   positions k * global_batch .. (k + 1) * global_batch - 1: one optimizer update
    micro-batch m of rank r   one of accumulation x dp_size nearly equal parts of it: one forward and backward

The last global batch of an epoch may be short. Its parts then differ by one sample at most; a part without any sample is
replaced by a `Padding`, which is computed, so that every rank takes part in every collective, and counts for nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from echelon.contracts.errors import UsageError
from echelon.contracts.overrides import overrides
from echelon.data.order import Order
from echelon.world.init import World

__all__ = ["Loader", "Padding", "share"]

T = TypeVar("T")


@dataclass(frozen=True)
class Padding(Generic[T]):
    """A batch that must be computed but weighs nothing."""

    batch: T


def share(samples: int, part: int, parts: int) -> tuple[int, int]:
    """Where part `part` of `parts` begins and ends among `samples`: sizes differ by one at most, larger ones first."""
    small, larger = divmod(samples, parts)
    start = part * small + min(part, larger)
    return start, start + small + (1 if part < larger else 0)


class Loader:
    """Batches of a map-style dataset, the same global batches for any number of ranks.

    Iterating gives this rank's micro-batches of one epoch; `len` is their number, equal on all ranks. After
    `load_state_dict` the first iteration goes on where the saved one stood.

    Args:
        dataset: has `__len__` and `__getitem__`; `__getitems__` is used if present.
        global_batch: samples per optimizer update over all ranks; ranks x accumulation must divide it.
        seed: of the order. The same on all ranks.
        shuffle: permute the samples, anew in every epoch.
        accumulation: micro-batches per update on each rank; give the unit the same `gradient_accumulation_steps`.
        tail: "keep" the short last global batch, weighted by its size, or "drop" it.
        num_workers: processes that load batches; 0 loads in this one.
        collate_fn: list of samples -> batch.
        pin_memory: page-locked host memory, for faster copies to a GPU.
        dp_rank, dp_size: this rank's place among those that see different data; by default what the unit's strategy says when
            a loop begins, and before that this rank's place among all.
    Raises:
        UsageError: a global batch that cannot be divided, or a dataset that cannot fill one.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        accumulation: int = 1,
        tail: Literal["keep", "drop"] = "keep",
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        dp_rank: int | None = None,
        dp_size: int | None = None,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise UsageError(
                f"{type(dataset).__name__} has no length: Loader needs a map-style dataset with __len__ and __getitem__."
            )
        if tail not in ("keep", "drop"):
            raise UsageError(f"tail {tail!r}: 'keep' or 'drop'.")
        if global_batch < 1 or accumulation < 1:
            raise UsageError(f"global_batch {global_batch}, accumulation {accumulation}: both at least 1.")
        if (dp_rank is None) != (dp_size is None):
            raise UsageError("give both dp_rank and dp_size, or neither.")
        self.dataset, self.global_batch, self.tail = dataset, global_batch, tail
        self.accumulation = overrides().accumulation or accumulation
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.collate_fn = collate_fn or default_collate
        self._dp = (dp_rank, dp_size) if dp_rank is not None and dp_size is not None else None
        self._dp_is_given = self._dp is not None
        samples = len(dataset)
        if samples < global_batch and (shuffle or tail == "drop"):
            raise UsageError(
                f"the dataset has {samples} samples, fewer than one global batch of {global_batch}. "
                f"Set global_batch to {samples} or less, or use more data."
            )
        self.order = Order(samples, seed, shuffle=shuffle)
        self.epoch = 0
        self.start = 0  # the micro-batch at which the next iteration begins; only `seek` and `load_state_dict` set it
        self._position = 0

    @property
    def dp(self) -> tuple[int, int]:
        """(dp_rank, dp_size), looked up when first needed: the group may be joined after the loader is made."""
        if self._dp is None:
            world = World.current(torch.device("cpu"))
            self._dp = (world.rank, world.size)
        parts = self._dp[1] * self.accumulation
        if self.global_batch % parts:
            near = sorted({max(parts, self.global_batch // parts * parts), (self.global_batch // parts + 1) * parts})
            raise UsageError(
                f"global_batch {self.global_batch} cannot be divided by {self._dp[1]} ranks x accumulation {self.accumulation} "
                f"= {parts}. Nearest that can: {' or '.join(map(str, near))}."
            )
        return self._dp

    def place(self, dp_rank: int, dp_size: int) -> None:
        """Where this rank stands among those that see different data, if the user did not say; the loops call it."""
        if not self._dp_is_given:
            self._dp = (dp_rank, dp_size)

    @property
    def global_batches(self) -> int:
        """Optimizer updates per epoch."""
        whole, rest = divmod(self.order.length, self.global_batch)
        return whole + (1 if rest and self.tail == "keep" else 0)

    @property
    def pads(self) -> bool:
        """Whether the last global batch is too short for every micro-batch of every rank to hold a sample."""
        return 0 < self._tail_samples < self.dp[1] * self.accumulation

    @property
    def is_uneven(self) -> bool:
        """Whether the micro-batches of the last global batch differ in size: only weights make their mean right."""
        return self._tail_samples % (self.dp[1] * self.accumulation) > 0

    @property
    def _tail_samples(self) -> int:
        return self.order.length % self.global_batch if self.tail == "keep" else 0

    def __len__(self) -> int:
        return self.global_batches * self.accumulation

    def batches_left(self) -> int:
        """Micro-batches that the next iteration will give: fewer than `len` after resuming in mid-epoch."""
        return len(self) - self.start

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the loops call it. Another epoch than the present one begins at its start."""
        if epoch != self.epoch:
            self.epoch, self.start, self._position = epoch, 0, 0

    def seek(self, position: int) -> None:
        """Begin the next iteration, and only that, after `position` micro-batches; at the epoch's end it gives none."""
        self.start = self._position = min(position, len(self))

    def positions_of(self, micro: int, dp_rank: int) -> tuple[int, int]:
        """The positions, from and to, of a micro-batch of one data-parallel rank; an empty range if it is padding."""
        batch, m = divmod(micro, self.accumulation)
        start = batch * self.global_batch
        count = min(self.global_batch, self.order.length - start)
        # Micro-batch by micro-batch over the ranks, so that a short batch leaves late micro-batches empty, not a rank.
        low, high = share(count, m * self.dp[1] + dp_rank, self.accumulation * self.dp[1])
        return start + low, start + high

    def __iter__(self) -> Iterator[Any]:
        dp_rank, _ = self.dp
        first, self.start = self.start, 0
        self._position = first
        shares = _Shares(self, first, len(self), dp_rank)
        # A generator of its own: the workers' seed must not be drawn from the stream that dropout uses.
        words = (self.order.seed, self.epoch, dp_rank, first)
        generator = torch.Generator().manual_seed(zlib.crc32(repr(words).encode()))
        batches: DataLoader[Any] = DataLoader(
            self.dataset,  # type: ignore[arg-type]
            batch_sampler=shares,
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            generator=generator,
        )
        for micro, batch in enumerate(batches, first):
            self._position = micro + 1
            yield batch if micro < shares.first_padding else Padding(batch)

    def state_dict(self) -> dict[str, Any]:
        """Where the latest iteration stands: a few numbers."""
        return self.state_at(self._position)

    def state_at(self, position: int) -> dict[str, Any]:
        """The state after `position` micro-batches of this epoch: what was used, when the reader is ahead of the user."""
        return {
            "epoch": self.epoch,
            "position": position,
            "accumulation": self.accumulation,
            "global_batch": self.global_batch,
            "seed": self.order.seed,
            "samples": self.order.length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, also with another number of ranks or another accumulation.

        Raises:
            UsageError: the data, its order or the global batch are not those of the saved run.
        """
        mine = self.state_dict()
        changed = [f"{k} was {state[k]}, is {mine[k]}" for k in ("samples", "seed", "global_batch") if state[k] != mine[k]]
        if changed:
            raise UsageError(f"the loader cannot go on where the saved one stood: {'; '.join(changed)}.")
        batches, rest = divmod(int(state["position"]), int(state["accumulation"]))
        if rest and state["accumulation"] != self.accumulation:
            raise UsageError(
                f"saved in the middle of an update ({rest} of {state['accumulation']} micro-batches): "
                f"resume it with accumulation {state['accumulation']}."
            )
        self.epoch, self.start = int(state["epoch"]), batches * self.accumulation + rest
        self._position = self.start


# Micro-batches whose samples are computed at once: a call costs 0.1 ms however few they are.
_AT_ONCE = 128


class _Shares:
    """The batch sampler of one rank and epoch: the index lists of its micro-batches."""

    def __init__(self, loader: Loader, first: int, last: int, dp_rank: int) -> None:
        self._loader, self._first, self._last, self._dp_rank = loader, first, last, dp_rank
        tail = range(max(first, last - loader.accumulation), last)
        self.first_padding = next((m for m in tail if self._is_empty(m)), last)

    def _is_empty(self, micro: int) -> bool:
        start, stop = self._loader.positions_of(micro, self._dp_rank)
        return start == stop

    def __len__(self) -> int:
        return self._last - self._first

    def __iter__(self) -> Iterator[list[int]]:
        loader = self._loader
        for begin in range(self._first, self._last, _AT_ONCE):
            ranges = [loader.positions_of(m, self._dp_rank) for m in range(begin, min(begin + _AT_ONCE, self._last))]
            positions = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in ranges])
            samples = loader.order.at(loader.epoch, positions).tolist()
            taken = 0
            for start, stop in ranges:
                # Padding is any sample: it is computed like the others and weighs nothing.
                yield samples[taken : taken + stop - start] or [0]
                taken += stop - start
