"""Which samples the ranks see, and what random numbers reading them draws.

Two things can be known. Of a DataLoader over a dataset with indices, the order of a whole epoch: a copy of its sampler tells it,
before anything is read. Of any other loader, the rows of the micro-batches that were recorded. Either way ranks are held against
one process, which may see rows several times as well: because the data has them twice, or because it draws with replacement.
Where the global batch is known, an update's samples are those that one process has for it, sample by sample.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from echelon.prover.generators import Sources, drawn_between
from echelon.prover.kept_state import ABSENT, KeptState, unlike
from echelon.prover.micro import Micro, checksums, digest, plain
from echelon.prover.objects import Objects

__all__ = [
    "Epoch",
    "Plan",
    "Reading",
    "Seen",
    "kept_by_reading",
    "note_on",
    "of_updates",
    "plan_of",
    "reads_alike",
    "rows_of",
    "unlike_an_epoch",
    "unlike_one_process",
]

_MOST_INDICES = 2_000_000
_MOST_ROWS = 100_000
_MOST_VALUES = 2_000_000
# Of rows padded to several widths: equal ones of the data, padded otherwise in one process, look like shared ones.
_MOST_EQUAL = 0.1
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
    """Of the epoch that begins; None if the loader does not tell. Draws nothing from any stream."""
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
    """Of what the dataset holds, as far as it can be looked into."""
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
    """The RNGs from which reading single samples draws: checksums before and after the first that drew.

    In each process that reads, it looks over the shoulder of the dataset's class and of the collate function at the first
    samples. It is a loader's `worker_init_fn`: workers that are not forked have nothing of what is replaced here.

    Args:
        file: where every process leaves what it saw.
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
        """By RNG, what was seen of it: of each process of the first epoch that has one."""
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
        own = vars(owner).get(name)
        setattr(owner, name, by)
        self._head.callback(*((delattr, owner, name) if own is None else (setattr, owner, name, own)))


class _Watched:
    """A collate function. What it draws as often for one sample as for all, it decides for the batch: ranks may do that alike."""

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
        """The RNGs that one sample alone leaves where all leave them."""
        self._sources.restore(before)
        try:
            self._collate(samples[:1])
            alone = self._sources.states()
        except Exception:  # a function of the user's own can want any number
            return set()
        finally:
            self._sources.restore(after)
        return after.keys() - drawn_between(after, alone).keys()


def rows_of(micros: Iterable[Micro]) -> Counter[int]:
    """How often each row of these micro-batches occurs, by its checksum."""
    counts: Counter[int] = Counter()
    for micro in micros:
        counts.update(micro.rows)
        if counts.total() > _MOST_ROWS:
            break
    return counts


@dataclass
class Epoch:
    """What one process reads in an epoch.

    Attributes:
        rows: how often each sample, by its checksum.
        values: of its floating-point numbers, as many as are kept.
        shapes: of its samples: one where nothing is padded.
        repeats: whether another epoch has the same samples.
    """

    rows: Counter[int] = field(default_factory=Counter)
    values: set[float] = field(default_factory=set)
    shapes: set[Any] = field(default_factory=set)
    repeats: bool = False

    def add(self, batch: Any, given: int | None) -> None:
        self.rows.update(checksums(batch, given))
        self.shapes.add(tuple(tensor.shape[1:] for tensor in _tensors(plain(batch))))
        for tensor in _floats(batch):
            if len(self.values) < _MOST_VALUES:
                self.values.update(tensor.flatten().tolist())


def _floats(batch: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in _tensors(plain(batch)) if tensor.is_floating_point())


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    waiting = [batch]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, dict)):
            waiting.extend(each.values() if isinstance(each, dict) else each)


def unlike_an_epoch(records: list[dict[str, Any]], one: Epoch) -> str | None:
    """Of the samples of ranks those that are not in one process's epoch; None where most numbers are.

    Sequences that each rank packs from its own documents are other samples made of the same numbers. Numbers that one process
    never reads were made otherwise, as where each rank standardises its own files.

    Args:
        records: of ranks that have no samples but those of one process: all where a Loader divides them, else rank 0, since a
            stream that only other ranks have may be their own.
    """
    if not one.repeats or len(one.shapes) > 1 or len(one.values) >= _MOST_VALUES:
        return None
    for record in records:
        micros = [m for update in record["updates"] for m in update if m.weight > 0 and m.epoch == 0]
        rows = rows_of(micros)
        if not (lacking := sum(count for row, count in rows.items() if row not in one.rows)):
            continue
        values = [value for m in micros for tensor in _floats(m.plain) for value in tensor.flatten().tolist()]
        if sum(value not in one.values for value in values) * 2 > len(values):
            return f"{lacking} of {rows.total()} samples of rank {record['rank']} are none that one process reads in an epoch"
    return None


def note_on(records: list[dict[str, Any]], of_one_process: Callable[[], Epoch | None]) -> str | None:
    """What is to be said about the samples of the first epoch over all ranks.

    Args:
        records: of the ranks that work on data of their own.
        of_one_process: what one process reads in an epoch; asked only if rows came twice.
    """
    plans: list[Plan | None] = [r["plan"] for r in records]
    known = [p for p in plans if p is not None]
    if len(known) == len(plans) and len({(p.size, p.dataset) for p in known}) == 1:
        return _on_plans(known)
    seen = [rows_of(m for u in r["updates"] for m in u if m.weight > 0 and m.epoch == 0) for r in records]
    twice = {row for row in set().union(*seen) if sum(row in rank for rank in seen) > 1}
    if not twice:
        return None
    epoch = of_one_process()
    if epoch is None:
        return None
    twice, total = {row for row in twice if epoch.rows[row] < 2}, len(set().union(*seen))
    if len(epoch.shapes) > 1 and len(twice) <= _MOST_EQUAL * total:
        return None
    return _overlap(len(twice), total, "recorded rows") if twice else None


def _on_plans(plans: list[Plan]) -> str | None:
    size, drawn = plans[0].size, sum(len(p.indices) for p in plans)
    if any(len(set(p.indices)) < len(p.indices) for p in plans):
        return None  # drawn with replacement: one process sees rows twice as well
    seen = Counter(i for p in plans for i in p.indices)
    overlap, missing = sum(c > 1 for c in seen.values()), size - len(seen)
    said = []
    if overlap > max(0, drawn - size) or drawn - size >= len(plans):  # a tail that is filled up needs a few twice
        said.append(_overlap(overlap, size, "rows"))
    if missing > max(0, size - drawn):  # a tail that is dropped, or a split that is not trained on, is missing in one process too
        said.append(f"samples are left out: {missing} of {size} rows were seen by no rank in epoch 0")
    return "; ".join(said) or None


@dataclass
class Seen:
    """The samples of one update, or of one batch of a single process.

    Attributes:
        rows: their checksums, in their order.
        shapes: of their tensors; several where batches are padded to widths of their own.
    """

    rows: list[int] = field(default_factory=list)
    shapes: set[Any] = field(default_factory=set)

    def add(self, rows: list[int], batch: Any) -> None:
        self.rows += rows
        self.shapes.add(tuple(tensor.shape[1:] for tensor in _tensors(plain(batch))))


def of_updates(records: list[dict[str, Any]]) -> list[Seen]:
    """The samples of each update of the first epoch, over all ranks that have samples of their own."""
    found: list[Seen] = []
    for of_ranks in zip(*(r["updates"] for r in records), strict=False):
        micros = [m for update in of_ranks for m in update]
        if any(m.epoch or m.weight <= 0 for m in micros):  # what weighs nothing may be padding, or samples without labels
            break
        found.append(Seen())
        for micro in micros:
            found[-1].add(micro.rows, micro.plain)
    return found


def unlike_one_process(updates: list[Seen], one: list[Seen]) -> str | None:
    """Which samples of the ranks are not those of one process; None where all are, or where they are padded otherwise.

    Args:
        updates: over all ranks.
        one: what one process has, batch by batch.
    """
    rows = [row for batch in one for row in batch.rows]
    shapes = set().union(*(batch.shapes for batch in one))
    begin = 0
    for k, seen in enumerate(updates):
        end = begin + len(seen.rows)
        lacking = (Counter(seen.rows) - Counter(rows[begin:end])).total()
        if end <= len(rows) and lacking and len(seen.shapes | shapes) == 1:
            return f"update {k}: {lacking} of {len(seen.rows)} samples are others than one process has for it"
        begin = end
    return None


def reads_alike(loader: Any) -> bool:
    """Whether a batch of the first samples is the same when it is read again, and no random numbers are drawn for it."""
    try:
        one, again = (digest(plain(loader.collate_fn(first_samples(loader)))) for _ in range(2))
    except Exception:  # a dataset of the user's own can be anything
        return False
    return one == again and drawn_by_reading(loader) == set()


def drawn_by_reading(loader: Any) -> set[str] | None:
    """The RNGs from which reading samples and collating them draws, in this process; None where nothing can be read by index."""
    try:
        sources = Sources((loader.dataset, loader.collate_fn), "loader")
        before = sources.states()
        loader.collate_fn(first_samples(loader))
        return set(drawn_between(before, sources.states()))
    except Exception:  # a dataset of the user's own can be anything
        return None


def kept_by_reading(loader: Any) -> str | None:
    """An attribute that reading a data set changes, as a counter, and on which its samples depend, though none are drawn."""
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
    """As one process reads them; of a stream, those that it begins with."""
    if isinstance(loader.dataset, IterableDataset):
        return list(itertools.islice(loader.dataset, _FIRST_SAMPLES))
    return [loader.dataset[i] for i in range(min(len(loader.dataset), _FIRST_SAMPLES))]


def _overlap(count: int, total: int, what: str) -> str:
    return f"samples overlap: {count} of {total} {what} were seen by two ranks or more in epoch 0"
