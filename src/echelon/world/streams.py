"""Random streams: what must start equal on all ranks does, what must differ between data-parallel ranks differs.

A script seeds all ranks alike (`seed`), builds the model, and every rank has the same one. Training then needs another
stream per data-parallel rank: with one for all, dropout drops the same units of different samples, on every rank.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from echelon.contracts.errors import UsageError

__all__ = ["at", "load_states", "put_back", "renew", "seed", "separate", "states"]


def seed(seed: int) -> None:
    """Seed Python, numpy and torch alike on this rank; call it with the same value on all.

    Raises:
        UsageError: outside 0 .. 2**32 - 1, numpy's range.
    """
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed {seed}: between 0 and {2**32 - 1}, the range that numpy takes.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# The seed of the stream that is this rank's own already, made by `separate` or loaded from a checkpoint.
_own: int | None = None


def separate(dp_rank: int) -> None:
    """Give this data-parallel rank a torch stream of its own, derived from the common seed. Rank 0 keeps the common one.

    So one process alone draws what plain PyTorch would. A stream that is this rank's own already is left alone.
    """
    global _own
    if dp_rank and torch.initial_seed() != _own:
        torch.manual_seed(_mix(torch.initial_seed(), dp_rank))
        _own = torch.initial_seed()


def renew(step: int) -> None:
    """Another common stream than any before, the same on all ranks: for a run that goes on without its saved streams."""
    torch.manual_seed(_mix(torch.initial_seed(), step + 2**32))


def at(common: int, position: int) -> None:
    """The torch stream that belongs to a position in training, for whichever rank works on it."""
    global _own
    torch.manual_seed(_mix(common, position + 2**33))
    _own = torch.initial_seed()


def _mix(common: int, rank: int) -> int:
    """A 63-bit seed, unrelated for neighbouring ranks. Source: the finalizer of SplitMix64, Steele et al. 2014."""
    mask = (1 << 64) - 1
    z = (common + 0x9E3779B97F4A7C15 * rank) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def states() -> dict[str, Any]:
    """This rank's streams as tensors and plain values, to be saved."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)),
    }


def load_states(saved: dict[str, Any]) -> None:
    """Take up `states()` of a checkpoint: from now on this rank's own."""
    global _own
    put_back(saved)
    _own = torch.initial_seed()


def put_back(saved: dict[str, Any]) -> None:
    """Undo what was drawn since `states()`.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: these are not what `states` gives. numpy checks nothing, and would read
            beyond its table.
    """
    kind, keys, position, has_gauss, gauss = saved["numpy"]
    if kind != "MT19937" or keys.shape != (624,) or not 0 <= position <= 624:
        raise ValueError(f"a stream of numpy's of type {kind!r} at {position} of {tuple(keys.shape)}")
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    version, internal, gauss_next = saved["python"]
    random.setstate((version, tuple(internal), gauss_next))
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
