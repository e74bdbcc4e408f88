"""What a rank notes of its loader: the order of an epoch, and the random numbers that reading the first samples draws."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from echelon.parallel.patching import for_now
from echelon.prover.micro import digest, plain
from echelon.prover.objects import Objects
from echelon.prover.pass_state import ABSENT, KeptState, Sources, drawn_between, unlike

__all__ = ["Plan", "Reading", "kept_by_reading", "plan_of", "reads_alike"]

_MOST_INDICES = 2_000_000
_FIRST_SAMPLES = 16  # reading draws in the first few or not at all
_READING_S = 1.0


@dataclass(frozen=True)
class Plan:
    """The indices of one epoch on one rank.

    Args:
        size: of the dataset.
        dataset: a checksum of it; indices of different datasets say nothing about each other.
    """

    indices: list[int]
    size: int
    dataset: int


def plan_of(loader: Any) -> Plan | None:
    """The plan of the epoch that begins; None if the loader does not tell. Leaves all RNG states as they were."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return None
    sources = Sources(loader, "loader")
    before = sources.states()
    try:
        twin = copy.deepcopy((loader.batch_sampler, loader.generator), {id(loader.dataset): loader.dataset})
        size = len(loader.dataset)  # type: ignore[arg-type]
        torch.empty((), dtype=torch.int64).random_(generator=twin[1])  # as the loader does for its workers, before its sampler
        indices: list[int] = []
        for batch in twin[0]:
            indices += map(int, batch)
            if len(indices) > _MOST_INDICES:
                return None
        return Plan(indices, size, _checksum(loader.dataset))
    except Exception:  # a sampler of the user's own can be anything
        return None
    finally:
        sources.restore(before)


def _checksum(dataset: Any) -> int:
    """A checksum of the dataset's content, as far as it can be inspected."""
    if isinstance(dataset, (list, tuple)):
        return digest([len(dataset), *dataset[:: max(1, len(dataset) // 1000)]])
    values = {
        n: v for n, v in vars(dataset).items() if isinstance(v, (torch.Tensor, np.ndarray, str, int, float, list, tuple, Dataset))
    }
    inner = {n: _checksum(v) if isinstance(v, Dataset) else v for n, v in values.items()}
    return digest(
        {"type": type(dataset).__qualname__, **{n: _checksum(v) if isinstance(v, (list, tuple)) else v for n, v in inner.items()}}
    )


class Reading:
    """The RNGs from which reading samples draws: checksums of their states before and after the first read that drew.

    In each process that reads, it watches the dataset's class and the collate function for the first samples. It is also the
    loader's `worker_init_fn`: workers that are not forked do not inherit what is replaced here.

    Args:
        file: where every process writes what it saw.
    """

    def __init__(self, loader: Any, file: Path) -> None:
        self._dataset, self._file = getattr(loader, "dataset", None), file
        self._own = getattr(loader, "worker_init_fn", None)
        self._looked, self._noted = 0, set[str]()
        self._head: contextlib.ExitStack | None = None
        self._begin()
        collate = getattr(loader, "collate_fn", None)
        if callable(collate) and collate is not default_collate:
            self._replace(loader, "collate_fn", _Watched(self, collate))
        if hasattr(loader, "worker_init_fn"):
            self._replace(loader, "worker_init_fn", self)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_head": None}

    def __call__(self, worker: int) -> None:
        if self._own is not None:
            self._own(worker)
        if self._head is None:
            self._begin()

    def end(self) -> dict[str, set[tuple[str, str]]]:
        """Stop watching. Returns by RNG the checksums (before, after) of each process that drew from it."""
        assert self._head is not None
        self._head.close()
        first: dict[tuple[str, str], tuple[str, str]] = {}
        for line in self._file.read_text().splitlines() if self._file.exists() else ():
            stream, worker, before, after = line.split("\t")
            first.setdefault((stream, worker), (before, after))
        return {stream: {ends for (each, _), ends in first.items() if each == stream} for stream, _ in first}

    def note(self, before: dict[str, Any], after: dict[str, Any], but: Set[str] = frozenset()) -> None:
        info = get_worker_info()
        for stream, state in drawn_between(before, after).items():
            if stream not in but and stream not in self._noted:
                self._noted.add(stream)
                with self._file.open("a") as file:
                    file.write(f"{stream}\t{info.id if info else ''}\t{digest(state)}\t{digest(after[stream])}\n")

    def _begin(self) -> None:
        self._head = contextlib.ExitStack()
        kind = type(self._dataset)
        with contextlib.suppress(TypeError):  # builtin types cannot be changed; they draw nothing
            for name in ("__getitem__", "__getitems__"):
                if hasattr(kind, name):
                    self._replace(kind, name, self._watched(getattr(kind, name), Sources(self._dataset, "dataset")))

    def _watched(self, original: Callable[[Any, Any], Any], sources: Sources) -> Callable[[Any, Any], Any]:
        def watched(read: Any, index: Any) -> Any:
            if read is not self._dataset or self._looked >= _FIRST_SAMPLES:
                return original(read, index)
            self._looked += 1
            before = sources.states()
            value = original(read, index)
            self.note(before, sources.states())
            return value

        return watched

    def _replace(self, owner: Any, name: str, by: Any) -> None:
        assert self._head is not None
        self._head.enter_context(for_now(owner, **{name: by}))


class _Watched:
    """A collate function. If it draws as much for one sample as for all, it decides for the batch, which ranks may do alike."""

    def __init__(self, reading: Reading, collate: Callable[[list[Any]], Any]) -> None:
        self._reading, self._collate = reading, collate
        self._sources, self._looked = Sources(collate, "collate_fn"), 0

    def __call__(self, samples: list[Any]) -> Any:
        if self._looked >= _FIRST_SAMPLES or len(samples) < 2:
            return self._collate(samples)
        self._looked += len(samples)
        before = self._sources.states()
        batch = self._collate(samples)
        after = self._sources.states()
        if drawn_between(before, after):
            self._reading.note(before, after, self._for_the_batch(samples, before, after))
        return batch

    def _for_the_batch(self, samples: list[Any], before: dict[str, Any], after: dict[str, Any]) -> Set[str]:
        """The RNGs that end in the same state after one sample as after all."""
        self._sources.restore(before)
        try:
            self._collate(samples[:1])
            alone = self._sources.states()
        except Exception:  # a function of the user's own can want any number
            return set()
        finally:
            self._sources.restore(after)
        return after.keys() - drawn_between(after, alone).keys()


def reads_alike(loader: Any) -> bool:
    """Whether a batch of the first samples is the same when it is read again, and no random numbers are drawn for it."""
    try:
        sources = Sources((loader.dataset, loader.collate_fn), "loader")
        before = sources.states()
        one, again = (digest(plain(loader.collate_fn(first_samples(loader)))) for _ in range(2))
        return one == again and not drawn_between(before, sources.states())
    except Exception:  # a dataset of the user's own can be anything
        return False


def kept_by_reading(loader: Any) -> str | None:
    """An attribute, such as a counter, that reading a data set changes, and on which its samples depend without any draws."""
    try:
        kept = KeptState(Objects(loader.dataset))
        before = kept.values()
        one = digest(plain(first_samples(loader)))
        ends = time.monotonic() + _READING_S
        for i in range(len(loader.dataset)):
            loader.dataset[i]
            if time.monotonic() > ends:
                break
        after, again = kept.values(), digest(plain(first_samples(loader)))
        began = {**dict.fromkeys(after, ABSENT), **before}  # an attribute may be set by the first sample that is read
        kept.restore(began)
        is_state = one != again and one == digest(plain(first_samples(loader)))
        return min(unlike(began, after), default=None) if is_state else None
    except Exception:  # a dataset of the user's own can be anything
        return None


def first_samples(loader: Any) -> list[Any]:
    """The first samples, as one process reads them."""
    if isinstance(loader.dataset, IterableDataset):
        return list(itertools.islice(loader.dataset, _FIRST_SAMPLES))
    return [loader.dataset[i] for i in range(min(len(loader.dataset), _FIRST_SAMPLES))]
