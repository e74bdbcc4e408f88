"""Which samples the ranks see, and what random numbers reading them draws.

Two things can be known. Of a DataLoader over a dataset with indices, the order of a whole epoch: a copy of its sampler tells it,
before anything is read. Of any other loader, the rows of the micro-batches that were recorded. Either way ranks are held against
one process, which may see rows several times as well: because the data has them twice, or because it draws with replacement.
Where the global batch is known, an update's samples are those that one process has for it, sample by sample.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from echelon.prover.generators import Sources, drawn_between
from echelon.prover.micro import Micro, digest, plain

__all__ = ["Plan", "Reading", "checksums", "note_on", "of_updates", "plan_of", "reads_alike", "rows_of", "unlike_one_process"]

_MOST_INDICES = 2_000_000
_MOST_ROWS = 100_000
_FIRST_SAMPLES = 16  # reading draws in the first few or not at all


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


@dataclass
class Reading:
    """The streams from which reading single samples draws, in this process: checksums before and after the first that drew."""

    drawn: dict[str, tuple[int, int]] = field(default_factory=dict)
    undo: Callable[[], None] = lambda: None

    @classmethod
    def watch(cls, loader: Any) -> Reading:
        """Look over the shoulder of the dataset's class as it reads its first samples."""
        reading, dataset = cls(), getattr(loader, "dataset", None)
        kind, sources, looked = type(dataset), Sources(dataset, "dataset"), 0

        def watching(original: Callable[..., Any]) -> Callable[..., Any]:
            def watched(self: Any, index: Any) -> Any:
                nonlocal looked
                if self is not dataset or looked >= _FIRST_SAMPLES:
                    return original(self, index)
                looked += 1
                before = sources.states()
                value = original(self, index)
                after = sources.states()
                for stream, state in drawn_between(before, after).items():
                    reading.drawn.setdefault(stream, (digest(state), digest(after[stream])))
                return value

            return watched

        own = {name: vars(kind).get(name) for name in ("__getitem__", "__getitems__") if hasattr(kind, name)}

        def undo() -> None:
            for name, original in own.items():
                if original is None:
                    delattr(kind, name)
                else:
                    setattr(kind, name, original)

        with contextlib.suppress(TypeError):  # builtin types cannot be changed; they draw nothing
            for name in own:
                setattr(kind, name, watching(getattr(kind, name)))
            reading.undo = undo
        return reading


def rows_of(micros: Iterable[Micro]) -> Counter[int]:
    """How often each row of these micro-batches occurs, by its checksum."""
    counts: Counter[int] = Counter()
    for micro in micros:
        counts.update(checksums(micro.plain))
        if counts.total() > _MOST_ROWS:
            break
    return counts


def checksums(batch: Any) -> list[int]:
    """Of each row of a batch in plain containers; of the batch, if it has no rows in common."""
    columns = list(_columns(batch))
    lengths = {len(c) for c in columns}
    if len(lengths) != 1:
        return [digest(batch)]
    return [digest([c[i] for c in columns]) for i in range(lengths.pop())]


def _columns(batch: Any) -> Iterable[Any]:
    if isinstance(batch, torch.Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _columns(value)
    elif isinstance(batch, list):
        if batch and not any(isinstance(v, (torch.Tensor, dict, list)) for v in batch):
            yield batch
        else:
            for value in batch:
                yield from _columns(value)


def note_on(records: list[dict[str, Any]], of_one_process: Callable[[], Counter[int] | None]) -> str | None:
    """What is to be said about the samples of the first epoch over all ranks.

    Args:
        records: of the ranks that work on data of their own.
        of_one_process: how often one process sees each row in an epoch; asked only if rows came twice.
    """
    plans: list[Plan | None] = [r["plan"] for r in records]
    known = [p for p in plans if p is not None]
    if len(known) == len(plans) and len({(p.size, p.dataset) for p in known}) == 1:
        return _on_plans(known)
    seen = [rows_of(m for u in r["updates"] for m in u if m.weight > 0 and m.epoch == 0) for r in records]
    twice = {row for row in set().union(*seen) if sum(row in rank for rank in seen) > 1}
    if not twice:
        return None
    usual = of_one_process()
    if usual is None:
        return None
    twice = {row for row in twice if usual[row] < 2}
    return _overlap(len(twice), len(set().union(*seen)), "recorded rows") if twice else None


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


def of_updates(records: list[dict[str, Any]]) -> list[Counter[int]]:
    """The rows of each update of the first epoch, over all ranks that have samples of their own."""
    found: list[Counter[int]] = []
    for of_ranks in zip(*(r["updates"] for r in records), strict=False):
        micros = [m for update in of_ranks for m in update]
        if any(m.epoch or m.weight <= 0 for m in micros):  # what weighs nothing may be padding, or samples without labels
            break
        found.append(rows_of(micros))
    return found


def unlike_one_process(updates: list[Counter[int]], one: list[int]) -> str | None:
    """Which samples of the ranks are not those of one process; None where all are.

    Args:
        updates: the rows of each, over all ranks.
        one: the rows that one process has, in their order.
    """
    begin = 0
    for k, rows in enumerate(updates):
        end = begin + rows.total()
        own = Counter(one[begin:end])
        lacking = (rows - own).total()
        if end <= len(one) and lacking:
            return f"update {k}: {lacking} of {rows.total()} samples are others than one process has for it"
        begin = end
    return None


def reads_alike(loader: Any) -> bool:
    """Whether a batch of the first samples is the same when it is read again: no random numbers are drawn for it."""
    try:
        dataset, collate = loader.dataset, loader.collate_fn or default_collate
        first = range(min(len(dataset), _FIRST_SAMPLES))
        one, again = (digest(plain(collate([dataset[i] for i in first]))) for _ in range(2))
    except Exception:  # a dataset of the user's own can be anything
        return False
    return one == again


def _overlap(count: int, total: int, what: str) -> str:
    return f"samples overlap: {count} of {total} {what} were seen by two ranks or more in epoch 0"
