"""A shuffled order computed on demand, in constant memory: position in the epoch -> sample.

Rule of truth 1: the sample at a position is a function of (seed, epoch, position) and nothing else, so neither world size
nor workers nor a restart can change the samples of global batch k.
"""

from __future__ import annotations

from math import isqrt
from typing import Protocol

import numpy as np
import numpy.typing as npt

from echelon.common.errors import LoaderError, require

__all__ = ["FORMULA", "Indices", "Order", "Positions", "SampleOrder", "key_of", "mix64"]

Indices = npt.NDArray[np.int64]
Positions = Indices
_Words = npt.NDArray[np.uint32]

# Number of the formula of the order; a saved position is valid only under the same formula.
FORMULA = 2

_ROUNDS = 10
# Elements per block: the intermediate arrays stay in the cache.
_BLOCK = 8192
_U32, _U64 = np.uint32, np.uint64


class SampleOrder(Protocol):
    """An order for a loader: the sample at any position of any epoch, as a pure function."""

    length: int  # positions in an epoch
    seed: int
    identity: str  # everything else that decides the order

    def at(self, epoch: int, positions: Positions) -> Indices: ...


class Order:
    """A permutation of 0 .. length - 1 for every epoch, or the identity.

    A sample's number is written as `left * columns + right` in the smallest near-square table that holds all numbers. Each round
    adds to one half a keyed hash of the other half, which is a permutation for any hash. The table has less than sqrt(length)
    cells too many; a number that falls into one of these goes through the rounds again until it falls inside.
    Source: Luby and Rackoff 1988; Black and Rogaway 2002, "Ciphers with arbitrary finite domains", generalised Feistel and
    cycle walking.

    Args:
        length: number of samples, 1 .. 2**62.
        seed: any whole number; each seed gives another order.
        shuffle: False keeps the samples in the dataset's order, in every epoch.
    """

    identity = ""

    def __init__(self, length: int, seed: int = 0, *, shuffle: bool = True) -> None:
        require(1 <= length <= 2**62, "length", "between 1 and 2**62 samples", length, kind=LoaderError)
        self.length, self.seed, self.shuffle = length, seed, shuffle
        self._rows = isqrt(length - 1) + 1  # both at most 2**31: sums of two fit into 32 bits
        self._columns = -(-length // self._rows)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """The samples at positions start .. stop - 1 of an epoch, as int64 of shape (stop - start,)."""
        if not 0 <= start <= stop <= self.length:
            raise LoaderError(f"positions must lie in an epoch of {self.length} samples, got {start} to {stop}.")
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def at(self, epoch: int, positions: Positions) -> Indices:
        """The samples at any positions of an epoch, in the order of the positions; (N,) int64 to (N,) int64."""
        return self._walk(positions, self._keys(epoch)) if self.shuffle else positions

    def _keys(self, epoch: int) -> list[np.uint32]:
        words = mix64(np.array([key_of(self.seed, epoch, r) for r in range(_ROUNDS)], dtype=_U64))
        return [_U32(word >> _U64(32)) for word in words]

    def _walk(self, values: Indices, keys: list[np.uint32]) -> Indices:
        out = np.empty(len(values), dtype=np.int64)
        for begin in range(0, len(values), _BLOCK):
            part = self._network(values[begin : begin + _BLOCK], keys)
            outside = np.flatnonzero(part >= self.length)
            while outside.size:
                part[outside] = again = self._network(part[outside], keys)
                outside = outside[again >= self.length]
            out[begin : begin + len(part)] = part
        return out

    def _network(self, values: Indices, keys: list[np.uint32]) -> Indices:
        quotient = values // self._columns
        left, right = quotient.astype(_U32), (values - quotient * self._columns).astype(_U32)
        for r in range(_ROUNDS):
            if r % 2 == 0:
                _turn(left, right, keys[r], self._rows)
            else:
                _turn(right, left, keys[r], self._columns)
        return left.astype(np.int64) * self._columns + right


def _turn(half: _Words, other: _Words, key: np.uint32, modulus: int) -> None:
    """One round, in place: half <- half + hash(other) modulo `modulus`."""
    hashed = _mix32(other, key).astype(_U64)
    hashed *= _U64(modulus)
    hashed >>= _U64(32)  # spread evenly over 0 .. modulus - 1, without a division
    half += hashed.astype(_U32)
    # In wrapping arithmetic, the smaller of x and x - modulus is x modulo `modulus`, for x below 2 * modulus.
    np.minimum(half, half - _U32(modulus), out=half)


def _mix32(x: _Words, key: np.uint32) -> _Words:
    """Every output bit depends on every input bit. Source: Wellons 2018, "Prospecting for hash functions", lowbias32."""
    x = x ^ key
    x ^= x >> _U32(16)
    x *= _U32(0x7FEB352D)
    x ^= x >> _U32(15)
    x *= _U32(0x846CA68B)
    x ^= x >> _U32(16)
    return x


def key_of(seed: int, epoch: int, stream: int) -> int:
    """One 64-bit key from three numbers, without collisions among small numbers."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + stream * 0x8CB92BA72F3D8DD7) & 0xFFFFFFFFFFFFFFFF


def mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every output bit depends on every input bit. Source: the finalizer of SplitMix64, Steele et al. 2014."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))
