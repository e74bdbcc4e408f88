"""Datasets with an order of their own: weighted draws, and mixtures at fixed ratios.

Both are map-style views of existing samples, and define the order in which a Loader reads them. The order is a function of (seed,
epoch, position), so there is no state to save, and nothing depends on ranks or workers.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence, Sized
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from echelon.common.arguments import flags
from echelon.common.errors import DatasetError, require
from echelon.common.numbers import whole
from echelon.data.order import Indices, Order, Positions, SampleOrder, key_of, mix64

__all__ = ["Mixture", "Ordered", "Weighted"]

_U64 = np.uint64


class Ordered(Dataset[Any]):
    """A map-style dataset with an order of its own."""

    @abstractmethod
    def order(self, seed: int, *, shuffle: bool) -> SampleOrder:
        """The order in which a loader with this seed asks for samples."""


class Weighted(Ordered):
    """Draws samples with replacement, with probabilities in proportion to their weights.

    The sample at a position depends on (seed, epoch, position) only; a draw costs a binary search.

    Args:
        dataset: map-style.
        weights: one for each sample, 0 or more; only their ratios count. Kept as their running sum, 8 bytes per sample.
        samples_per_epoch: draws per epoch; by default the number of samples.
    Raises:
        UsageError: weights that are negative, not finite, all zero or too few.
    """

    def __init__(self, dataset: Any, weights: npt.ArrayLike, *, samples_per_epoch: int | None = None) -> None:
        require(isinstance(dataset, Sized), "dataset", "map-style, with __len__ and __getitem__", dataset, kind=DatasetError)
        try:
            given = np.asarray(weights, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DatasetError(f"weights must be numbers, one for each sample, got {type(weights).__name__}: {error}.") from None
        if given.shape != (len(dataset),):
            raise DatasetError(f"weights must have shape ({len(dataset)},), one for each sample, got {given.shape}.")
        if not np.isfinite(given).all() or (given < 0).any() or not given.any():
            worst = int(np.argmin(np.where(np.isfinite(given), given, -np.inf)))
            raise DatasetError(f"weights must be finite, at least 0 and not all 0, got {given[worst]} for sample {worst}.")
        self.dataset = dataset
        self.samples_per_epoch = _per_epoch(samples_per_epoch, len(dataset))
        self._sums = np.cumsum(given / given.max())
        self._last = int(np.flatnonzero(given)[-1])

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return _read(self.dataset, indices)

    def order(self, seed: int, *, shuffle: bool = True) -> SampleOrder:
        if not shuffle:
            raise DatasetError(
                "shuffle must be True for weighted draws, which have no order, got False. Use the dataset without weights."
            )
        return _Draws(self._sums, self._last, self.samples_per_epoch, seed)


def _per_epoch(given: int | None, samples: int) -> int:
    return whole("samples_per_epoch", given, at_least=1, kind=DatasetError) if given is not None else samples


class _Draws:
    def __init__(self, sums: npt.NDArray[np.float64], last: int, length: int, seed: int) -> None:
        self._sums, self._last, self.length, self.seed = sums, last, length, seed
        self.identity = f"weights {zlib.crc32(sums.tobytes()):08x}"

    def at(self, epoch: int, positions: Positions) -> Indices:
        key = mix64(np.array([key_of(self.seed, epoch, 101)], dtype=_U64))
        # SplitMix64 as a function of its counter; 53 bits give a fraction.
        words = mix64(key + positions.astype(_U64) * _U64(0x9E3779B97F4A7C15))
        fractions = (words >> _U64(11)).astype(np.float64) * 2.0**-53
        # side="right": a sample of weight 0 has the same running sum as the one before it, and is never drawn.
        indices: Indices = np.searchsorted(self._sums, fractions * self._sums[-1], side="right")
        return np.minimum(indices, self._last)


class Mixture(Ordered):
    """Several datasets at fixed ratios.

    After any number of samples, counted over all epochs, each dataset has given its ratio of them to within one sample. Each
    dataset has its own shuffled order and its own epochs: when it is used up, it begins again in another order, independently of
    the others.

    Sample: that of the dataset; with `named=True` the pair (name, sample).

    Args:
        datasets: map-style, by name.
        ratios: by the same names, above 0; numbers, fractions or text like "1/3". Their sum does not matter.
        samples_per_epoch: positions per epoch of the mixture; by default the total number of samples.
        named: give the dataset's name with each sample.
    Attributes:
        ratios: the ratios used, as exact fractions. Ratios without a common denominator up to 100,000 are rounded to it.
    Raises:
        UsageError: names that do not match, a ratio that is not above 0, an empty dataset.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        ratios: Mapping[str, float | Fraction | str],
        *,
        samples_per_epoch: int | None = None,
        named: bool = False,
    ) -> None:
        for name, given in (("datasets", datasets), ("ratios", ratios)):
            require(isinstance(given, Mapping), name, "a dict by the datasets' names", given, kind=DatasetError)
        flags(named=named, kind=DatasetError)
        for name, dataset in datasets.items():
            require(
                isinstance(dataset, Sized),
                f"datasets[{name!r}]",
                "map-style, with __len__ and __getitem__",
                dataset,
                kind=DatasetError,
            )
        if not datasets or set(datasets) != set(ratios):
            raise DatasetError(
                f"ratios must have the names of the datasets, {sorted(datasets)}, at least one, got {sorted(ratios)}."
            )
        self.names = list(datasets)
        self.datasets = [datasets[name] for name in self.names]
        lengths = [len(dataset) for dataset in self.datasets]
        if not all(lengths):
            raise DatasetError(f"every dataset must hold at least one sample, got none in {self.names[lengths.index(0)]!r}.")
        shares = _shares([ratios[name] for name in self.names], self.names)
        self.ratios = {name: Fraction(share, sum(shares)) for name, share in zip(self.names, shares, strict=True)}
        self.samples_per_epoch = _per_epoch(samples_per_epoch, sum(lengths))
        self.named = named
        self._starts = [0, *accumulate(lengths)]
        self._shares = shares

    def __len__(self) -> int:
        return self._starts[-1]

    def locate(self, index: int) -> tuple[str, int]:
        """The dataset of a sample of the mixture, and the sample's index in it."""
        which = bisect_right(self._starts, index) - 1
        return self.names[which], index - self._starts[which]

    def __getitem__(self, index: int) -> Any:
        which = bisect_right(self._starts, index) - 1
        sample = self.datasets[which][index - self._starts[which]]
        return (self.names[which], sample) if self.named else sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read samples of the same dataset together, so that its own `__getitems__` is used."""
        wanted = np.asarray(indices, dtype=np.int64)
        owners = np.searchsorted(self._starts, wanted, side="right") - 1
        samples: list[Any] = [None] * len(wanted)
        for which in np.unique(owners).tolist():
            at = np.flatnonzero(owners == which).tolist()
            values = _read(self.datasets[which], [indices[i] - self._starts[which] for i in at])
            for i, value in zip(at, values, strict=True):
                samples[i] = (self.names[which], value) if self.named else value
        return samples

    def order(self, seed: int, *, shuffle: bool = True) -> SampleOrder:
        return _Mixed(self._shares, self._starts, self.samples_per_epoch, seed, shuffle=shuffle)


class _Mixed:
    """Maps a position to a dataset by a table of one period, and the dataset's count so far to its own epoch and position."""

    def __init__(self, shares: list[int], starts: list[int], length: int, seed: int, *, shuffle: bool) -> None:
        self.length, self.seed = length, seed
        self.identity = f"mixture of {list(zip(shares, np.diff(starts).tolist(), strict=True))}"
        self._starts, self._period = starts, sum(shares)
        self._owners, self._before = _schedule(tuple(shares))
        self._shares = np.asarray(shares, dtype=np.int64)
        lengths = np.diff(starts).tolist()
        self._orders = [Order(n, key_of(seed, which, 211), shuffle=shuffle) for which, n in enumerate(lengths)]

    def at(self, epoch: int, positions: Positions) -> Indices:
        periods, phases = np.divmod(positions + epoch * self.length, self._period)
        owners = self._owners[phases]
        counts = periods * self._shares[owners] + self._before[phases]  # samples that this dataset has given before
        out = np.empty(len(positions), dtype=np.int64)
        for which in np.unique(owners).tolist():
            order, positions_of_own = self._orders[which], np.flatnonzero(owners == which)
            own_epochs, own_positions = np.divmod(counts[positions_of_own], order.length)
            for own in np.unique(own_epochs).tolist():
                in_epoch = own_epochs == own
                out[positions_of_own[in_epoch]] = order.at(own, own_positions[in_epoch]) + self._starts[which]
        return out


def _read(dataset: Any, indices: Sequence[int]) -> list[Any]:
    together = getattr(dataset, "__getitems__", None)
    values: list[Any] = together(indices) if together is not None else [dataset[i] for i in indices]
    return values


_DENOMINATOR = 100_000


def _shares(ratios: list[float | Fraction | str], names: list[str]) -> list[int]:
    """Ratios as whole numbers whose sum is at most about `_DENOMINATOR`."""
    exact = []
    for ratio, name in zip(ratios, names, strict=True):
        try:
            value = Fraction(ratio)
        except (ValueError, TypeError, OverflowError, ZeroDivisionError) as error:
            raise DatasetError(f"the ratio of {name!r} must be a number, got {ratio!r}: {error}.") from error
        if value <= 0:
            raise DatasetError(
                f"the ratio of {name!r} must be above 0, got {ratio}. Leave the dataset out to draw nothing from it."
            )
        # 0.3 means 3/10, not the binary fraction next to it.
        near = value.limit_denominator(_DENOMINATOR)
        exact.append(near if isinstance(ratio, float) and float(near) == ratio else value)
    total = sum(exact)
    exact = [value / total for value in exact]
    denominator = lcm(*(value.denominator for value in exact))
    if denominator <= _DENOMINATOR:
        return [int(value * denominator) for value in exact]
    rounded = [round(value * _DENOMINATOR) for value in exact]
    for value, share, name in zip(exact, rounded, names, strict=True):
        if abs(share - value * _DENOMINATOR) > value * _DENOMINATOR / 100:
            raise DatasetError(
                f"the ratio of {name!r} is {float(value):.3g} of all, too small to be kept to within 1%. "
                f"Give ratios with a common denominator up to {_DENOMINATOR}."
            )
    return rounded


@lru_cache(maxsize=8)
def _schedule(shares: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """One period: the dataset at each phase, and how often it came before in the period.

    Among the datasets that lag far enough to be due, choose the one with the earliest deadline. With m datasets, none is ever
    further than 1 - 1/(2m - 2) samples from its ratio.
    Source: Tijdeman 1980, "The chairman assignment problem"; in whole numbers, multiplied by period * (2m - 2).
    """
    many, period = len(shares), sum(shares)
    owners, before = np.zeros(period, dtype=np.int64), np.arange(period, dtype=np.int64)
    if many == 1:
        return owners, before
    scale = 2 * many - 2
    share, given = np.asarray(shares, dtype=np.int64), np.zeros(many, dtype=np.int64)
    for phase in range(period):
        lag = (share * (phase + 1) - given * period) * scale
        due = lag >= period
        wait = np.where(due, (period * (scale - 1) - lag) / share, np.inf)
        chosen = int(np.argmin(wait))
        owners[phase], before[phase] = chosen, given[chosen]
        given[chosen] += 1
    return owners, before
