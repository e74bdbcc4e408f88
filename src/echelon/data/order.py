"""A shuffled order that nobody stores: position in the epoch -> sample, computed, in constant memory.

Rule of truth 1: the sample at a position is a function of (seed, epoch, position) and nothing else, so neither world size
nor workers nor a restart can change which samples make up global batch k.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echelon.contracts.errors import UsageError

__all__ = ["Order"]

Indices = npt.NDArray[np.int64]

_ROUNDS = 6
_U64 = np.uint64


class Order:
    """A permutation of 0 .. length - 1 for every epoch, or the identity.

    A balanced Feistel network over the next larger power of four is a permutation whatever its round function; values
    outside the range are fed in again until they fall inside (at most four times on average).
    Source: Luby and Rackoff 1988; Black and Rogaway 2002, "Ciphers with arbitrary finite domains", cycle walking.

    Args:
        length: number of samples, 1 .. 2**62.
        seed: any whole number; another seed is another order.
        shuffle: False keeps the samples in their own order, in every epoch.
    """

    def __init__(self, length: int, seed: int = 0, *, shuffle: bool = True) -> None:
        if not 1 <= length <= 2**62:
            raise UsageError(f"an order over {length} samples: between 1 and 2**62.")
        self.length, self.seed, self.shuffle = length, seed, shuffle
        self._half_bits = max(1, ((length - 1).bit_length() + 1) // 2)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """The samples at positions start .. stop - 1 of an epoch, as int64 of shape (stop - start,)."""
        if not 0 <= start <= stop <= self.length:
            raise UsageError(f"positions {start} to {stop} of an epoch of {self.length} samples.")
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def at(self, epoch: int, positions: Indices) -> Indices:
        """The samples at any positions of an epoch, in the order asked; (N,) int64 to (N,) int64."""
        return self._permute(positions, epoch) if self.shuffle else positions

    def _permute(self, positions: Indices, epoch: int) -> Indices:
        keys = [_mix(np.array([_key(self.seed, epoch, r)], dtype=_U64))[0] for r in range(_ROUNDS)]
        values = self._network(positions.astype(_U64), keys)
        outside = values >= _U64(self.length)
        while outside.any():
            values[outside] = self._network(values[outside], keys)
            outside = values >= _U64(self.length)
        return values.astype(np.int64)

    def _network(self, values: npt.NDArray[np.uint64], keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
        bits, mask = _U64(self._half_bits), _U64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << bits) | right


def _key(seed: int, epoch: int, round_: int) -> int:
    """One number for the three, without collisions among small ones."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + round_ * 0x8CB92BA72F3D8DD7) & 0xFFFFFFFFFFFFFFFF


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every output bit depends on every input bit. Source: the finalizer of SplitMix64, Steele et al. 2014."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))
