"""Several loaders, read one after the other as one."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from echelon.data.base import BaseLoader

__all__ = ["Chain", "loaders_of"]


class Chain:
    """Loaders one after the other. It knows from which of them a batch came.

    Args:
        loaders: one or several.
        limits: how many batches to read of each at most; None is all of them.
    """

    def __init__(self, loaders: Sequence[Iterable[Any]], limits: Sequence[int | None]) -> None:
        self.loaders, self.limits = list(loaders), list(limits)
        self._begins: list[int] = []  # the first batch of each loader that was read so far, counted over all

    def cut(self, most: int) -> Chain:
        """A chain with at most so many batches of each loader."""
        return Chain(self.loaders, [most if limit is None else min(most, limit) for limit in self.limits])

    def set_data_rank(self, dp_rank: int, dp_size: int) -> None:
        """Set this rank's data-parallel rank and size; the loops call it."""
        for loader in self.loaders:
            if isinstance(loader, BaseLoader):
                loader.set_data_rank(dp_rank, dp_size)

    @property
    def reading(self) -> int:
        """The index of the loader that the latest batch was read from, perhaps ahead of its step."""
        return max(len(self._begins) - 1, 0)

    def place(self, step: int) -> tuple[int, int]:
        """(number within its loader, the loader's index) of a batch of the current iteration, by its number."""
        index = bisect.bisect_right(self._begins, step) - 1
        return step - self._begins[index], index

    def __iter__(self) -> Iterator[Any]:
        self._begins, count = [], 0
        for loader, limit in zip(self.loaders, self.limits, strict=True):
            self._begins.append(count)
            for batch in itertools.islice(loader, limit):
                yield batch
                count += 1


def loaders_of(loader: Any) -> list[Any]:
    """The loaders that a loader consists of: itself, or those that it reads."""
    return loader.loaders if isinstance(loader, Chain) else [loader]
