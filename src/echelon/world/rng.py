"""RNG states: equal on all ranks at the start, and different between data-parallel ranks in training.

A script seeds all ranks alike (`seed`) and builds the model, so every rank has the same one. Training then needs a different
stream on each data-parallel rank. With one stream for all, dropout would drop the same units of different samples on every rank,
and augmentation would transform them alike. Ranks that compute the same samples together need the same streams. This applies to
torch, numpy and Python.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from echelon.common.errors import require
from echelon.common.numbers import whole
from echelon.world import agree

__all__ = [
    "GENERATORS",
    "GeneratorState",
    "at",
    "begin",
    "digest",
    "draw",
    "kept",
    "load_states",
    "mix",
    "position",
    "put_back",
    "renew",
    "seed",
    "separate",
    "set_state",
    "start",
    "state_of",
    "states",
    "unchanged",
]


def seed(seed: int) -> None:
    """Seed Python, numpy and torch on this rank. Call it with the same value on all ranks.

    Raises:
        UsageError: the seed is outside of 0 .. 2**32 - 1, numpy's range.
    """
    seed = whole("seed", seed)
    require(0 <= seed < 2**32, "seed", f"between 0 and {2**32 - 1}, numpy's range", seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# The seed of this rank's own torch stream, if it was made by `separate` or loaded from a checkpoint.
_own: int | None = None
# The digests of the streams as they were loaded from a checkpoint.
_loaded: list[str] | None = None


def separate(dp_rank: int) -> None:
    """Give this data-parallel rank its own RNG states, derived from the common ones. Rank 0 keeps the common ones. Collective.

    So a single process draws the same numbers as the program without ranks. Streams that are already this rank's own, or were
    restored, are left alone. The seeds of numpy's and Python's streams are unknown, so ranks compare their states. If ranks of
    one `dp_rank` have different states, because they were not seeded or one drew more, they get equal ones.
    """
    global _own
    if dp_rank and torch.initial_seed() != _own:
        torch.manual_seed(mix(torch.initial_seed(), dp_rank))
        _own = torch.initial_seed()
    if not agree.is_joined():
        return
    own_digests = _digests()
    digests_of_all = agree.gather([dp_rank, own_digests, own_digests == _loaded])
    if all(as_loaded for _, _, as_loaded in digests_of_all):
        return
    for i, stream in enumerate(_STREAMS):
        peers = [digests[i] for rank, digests, _ in digests_of_all if rank == dp_rank]
        others = {digests[i] for rank, digests, _ in digests_of_all if rank != dp_rank}
        if len(set(peers)) > 1 or (dp_rank and peers[0] in others):
            _begin(stream, peers[0], dp_rank)
    _own = torch.initial_seed() if dp_rank else _own


def renew(step: int) -> None:
    """Start new common RNG states, the same on all ranks, for a run that resumes without its saved states."""
    torch.manual_seed(mix(torch.initial_seed(), step + 2**32))
    for stream, now in zip(_STREAMS[1:], _digests()[1:], strict=True):
        _begin(stream, now, step + 2**32)


def at(common: int, others: str, position: int) -> None:
    """Start the streams of a position in training, the same on whichever rank works on it.

    Args:
        common, others: torch's seed and the `digest` of the other streams, as they were on all ranks when training began.
    """
    global _own
    torch.manual_seed(mix(common, position + 2**33))
    _own = torch.initial_seed()
    for stream in _STREAMS[1:]:
        _begin(stream, others, position + 2**33)


def draw() -> list[int]:
    """Draw a seed from each of this process's streams, for `start` in another process."""
    return [int(torch.randint(2**62, ())), random.getrandbits(62), int(np.random.randint(2**31 - 1))]


def start(seeds: Sequence[int]) -> None:
    """Seed the streams with the result of `draw` in another process."""
    torch.manual_seed(seeds[0])
    random.seed(seeds[1])
    np.random.seed(seeds[2])


def position(state: torch.Tensor) -> int:
    """A checksum of a state of torch's RNG, below 2**32. It is cheap."""
    return zlib.crc32(state.numpy().tobytes())


def digest() -> str:
    """A digest of the states of Python's and numpy's streams."""
    return "-".join(_digests()[1:])


# In the order of `_digests`.
_STREAMS = ("torch", "python", "numpy")


def _digests() -> list[str]:
    """The digests of the states of all streams."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpys = (kind, np.asarray(keys).tobytes(), position, has_gauss, gauss)
    each = (torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode(), repr(numpys).encode())
    return [hashlib.sha256(state).hexdigest()[:32] for state in each]


def _begin(stream: str, origin: str, number: int) -> None:
    """Seed a stream from a digest and a number."""
    value = int.from_bytes(hashlib.sha256(f"{stream} {origin} {number}".encode()).digest()[:16], "little")
    if stream == "torch":
        torch.manual_seed(value >> 65)
    elif stream == "python":
        random.seed(value)
    else:
        np.random.seed([value >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)])


@contextlib.contextmanager
def kept(device: torch.device) -> Iterator[torch.Tensor | None]:
    """Context that restores torch's RNG states on the host and on a device. Yields the host's state; None with fake tensors,
    which draw nothing.
    """
    host = torch.default_generator.get_state() if type(torch.empty(())) is torch.Tensor else None
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield host
    finally:
        if host is not None:
            torch.default_generator.set_state(host)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)


def begin(seed: int, device: torch.device) -> None:
    """Seed torch's streams on the host and on a device. `torch.manual_seed` would take a millisecond each time: for an unused
    GPU it records the stack of its caller.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def mix(common: int, number: int) -> int:
    """Mix a seed and a number into a 63-bit seed; neighbouring numbers give unrelated seeds.

    Source: the finalizer of SplitMix64, Steele et al. 2014.
    """
    mask = (1 << 64) - 1
    z = (common + 0x9E3779B97F4A7C15 * number) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def states() -> dict[str, Any]:
    """This rank's RNG states as tensors and plain values, to be saved."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": _table(np.random.get_state(legacy=True)),
    }


def _table(state: Any) -> tuple[str, torch.Tensor, int, int, float]:
    kind, keys, position, has_gauss, gauss = state
    return str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Context after which this rank's RNG states are as before."""
    before = states()
    try:
        yield
    finally:
        put_back(before)


def load_states(saved: dict[str, Any]) -> None:
    """Load `states()` from a checkpoint. They count as this rank's own streams."""
    global _own, _loaded
    put_back(saved)
    _own, _loaded = torch.initial_seed(), _digests()


def put_back(saved: dict[str, Any]) -> None:
    """Restore RNG states of `states()`.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: `saved` is not a result of `states`. numpy itself checks nothing, and would
            read beyond its table.
    """
    numpys = _checked_table(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    version, internal, gauss_next = saved["python"]
    random.setstate((version, tuple(internal), gauss_next))
    np.random.set_state(numpys)


def _checked_table(state: Any) -> tuple[Any, ...]:
    kind, keys, position, has_gauss, gauss = state
    if kind != "MT19937" or keys.shape != (624,) or not 0 <= position <= 624:
        raise ValueError(f"invalid RNG state of numpy: type {kind!r}, position {position}, keys of shape {tuple(keys.shape)}")
    return kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss


# --- generators that the user has made

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def state_of(generator: Any) -> Any:
    """The state of one of `GENERATORS`, as a tensor or plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return _table(generator.get_state(legacy=True)) if isinstance(generator, np.random.RandomState) else generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Restore a state of `state_of`.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: it is not one of such a generator.
    """
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_checked_table(state))
    elif isinstance(generator, random.Random):
        version, internal, gauss_next = state
        generator.setstate((version, tuple(internal), gauss_next))
    else:
        # numpy checks no position in a table: of a MT19937, in `state`; of a Philox.
        for place, most in ((state["state"].get("pos", 0), 624), (state.get("buffer_pos", 0), 4)):
            if not 0 <= place <= most:
                raise ValueError(f"invalid state of a {state['bit_generator']}: position {place} of {most}")
        generator.bit_generator.state = state


class GeneratorState:
    """A generator as an object that is saved."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": state_of(self._generator)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state(self._generator, state_dict["state"])
