"""Which samples the ranks see, and what random numbers reading them draws.

For a DataLoader over a dataset with indices, a copy of its sampler tells the order of a whole epoch, before anything is read. For
any other loader, the rows of the recorded micro-batches are known. Either way ranks are compared with one process, which may see
rows several times as well: the data may have them twice, or the sampler may draw with replacement. If the global batch is known,
an update's samples must be those that one process has for it, sample by sample.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from echelon.common.errors import RankFailedError
from echelon.data.loader import Loader
from echelon.data.prefetch import Feed
from echelon.loop.callback import Callback
from echelon.prover.matrix import Row
from echelon.prover.micro import Micro, checksums, digest, leaves, on_host, plain, widened, widths_of
from echelon.prover.on_ranks import OnRanks, RowRun
from echelon.prover.operators import without_narrow_casts
from echelon.prover.proof import Result
from echelon.prover.rank import Replay
from echelon.prover.reading import Plan, kept_by_reading, reads_alike
from echelon.prover.records import RankRecord
from echelon.prover.values import parameters_of
from echelon.world import rng

__all__ = [
    "SampleChecks",
    "Seen",
    "note_on",
    "of_updates",
    "print_begin",
    "read_alone",
    "unlike_an_epoch",
    "unlike_one_process",
]

_FIRST_BATCHES = 4
_EPOCH_S = 10.0  # for counting what one process sees in an epoch
_MOST_ROWS = 100_000
_MOST_VALUES = 2_000_000
# For rows padded to several widths, up to this share: equal rows of the data, padded otherwise in one process, look shared.
_MOST_EQUAL = 0.1
_SAME_LOSS = 1e-4


@dataclass
class Seen:
    """The samples of one update, or those that a single process has.

    Attributes:
        rows: their checksums, in their order.
        shapes: of their tensors; several if batches are padded to widths of their own.
        values: their floating-point numbers, up to a limit; only for an epoch.
        repeats: whether another reading has the same samples; in the same order, unless it is of an epoch.
    """

    rows: list[int] = field(default_factory=list)
    shapes: set[Any] = field(default_factory=set)
    values: set[float] = field(default_factory=set)
    repeats: bool = False

    def add(self, rows: list[int], batch: Any) -> None:
        self.rows += rows
        self.shapes.add(tuple(widths_of(plain(batch))))

    def add_values(self, batch: Any) -> None:
        for tensor in _floats(batch):
            if len(self.values) < _MOST_VALUES:
                self.values.update(tensor.flatten().tolist())


def _drawn_as_on_ranks(replay: Replay) -> AbstractContextManager[None]:
    """In float64, have data sets draw float32's numbers also in a reference's thread, which torch's mode does not reach."""
    return without_narrow_casts() if replay.dtype is torch.float64 else contextlib.nullcontext()


def read_alone(replay: Replay, count: int | None) -> dict[str, Any]:
    """What one process reads: its first `count` samples, or an epoch.

    Returns:
        `seen`: the samples; None if reading takes too long. `keeps`: see `kept_by_reading`. `size`: of a Loader's data set.
    """

    def read(unit: Any, dataloader: Any, callbacks: Sequence[Callback]) -> dict[str, Any]:
        ends = time.monotonic() + _EPOCH_S

        def once(seed: int) -> Seen | None:
            rng.seed(seed)
            seen = Seen()
            for step in Feed(dataloader):
                batch = widened(on_host(step.batch), replay.dtype)
                seen.add(checksums(batch, step.samples), batch)
                if count is None:
                    seen.add_values(batch)
                elif len(seen.rows) >= count:
                    break
                if time.monotonic() > ends:
                    return None
            return seen

        with _drawn_as_on_ranks(replay):
            seen = once(0)
            again = once(1) if seen is not None else None
            # Workers may be seeded alike for every epoch, and a Loader seeds each sample.
            is_seeded = count is not None or getattr(dataloader, "num_workers", 0) > 0
            if seen is not None and again is not None and (not is_seeded or reads_alike(dataloader)):
                # The first samples may be all of a small epoch: then only their order tells whether a Loader decides it.
                in_order = seen.rows == again.rows
                seen.repeats = in_order if count is not None else Counter(seen.rows) == Counter(again.rows)
        size = len(dataloader.dataset) if isinstance(dataloader, Loader) else None
        return {"seen": seen, "keeps": kept_by_reading(dataloader), "size": size}

    return replay.instead_of_training(read, replay.dtype)


def print_begin(file: str) -> None:
    """Print checksums of the initial parameters and the first batches of a pickled Replay."""

    def read(unit: Any, dataloader: Any, callbacks: Sequence[Callback]) -> dict[str, Any]:
        seen = [digest({name: p.detach() for name, p in parameters_of(unit)})]
        seen += [digest(on_host(step.batch)) for step, _ in zip(Feed(dataloader), range(_FIRST_BATCHES), strict=False)]
        return {"seen": seen}

    replay: Replay = pickle.loads(Path(file).read_bytes())
    print(f"\n{replay.instead_of_training(read, replay.dtype)['seen']}", flush=True)


def _of_first_epoch(record: RankRecord) -> list[Micro]:
    """A rank's own micro-batches of the first epoch."""
    return [m for m in record.micros if m.weight > 0 and m.epoch == 0]


def _rows_of(micros: list[Micro]) -> Counter[int]:
    """How often each row of these micro-batches occurs, by its checksum."""
    counts: Counter[int] = Counter()
    for micro in micros:
        counts.update(micro.rows)
        if counts.total() > _MOST_ROWS:
            break
    return counts


def _floats(batch: Any) -> Iterator[torch.Tensor]:
    return (each for each in leaves(plain(batch)) if isinstance(each, torch.Tensor) and each.is_floating_point())


def unlike_an_epoch(records: list[RankRecord], one: Seen) -> str | None:
    """Which samples of a rank are not in one process's epoch; None if most of their numbers are.

    Sequences that each rank packs from its own documents are other samples made of the same numbers. Numbers that one process
    never reads were computed otherwise, for example if each rank standardises its own files.

    Args:
        records: of ranks that must have samples of one process: all ranks if a Loader divides them; otherwise rank 0, since
            other ranks may read streams of their own.
    """
    if not one.repeats or len(one.shapes) > 1 or len(one.values) >= _MOST_VALUES:
        return None
    known = set(one.rows)
    for record in records:
        micros = _of_first_epoch(record)
        rows = _rows_of(micros)
        if not (lacking := sum(count for row, count in rows.items() if row not in known)):
            continue
        values = [value for m in micros for tensor in _floats(m.plain) for value in tensor.flatten().tolist()]
        if sum(value not in one.values for value in values) * 2 > len(values):
            return f"{lacking} of {rows.total()} samples of rank {record.rank} are not among those of an epoch in one process"
    return None


def note_on(records: list[RankRecord], of_one_process: Callable[[], Seen | None]) -> str | None:
    """A note on the samples of the first epoch over all ranks; None if they are as they should be.

    Args:
        records: of the ranks that work on data of their own.
        of_one_process: gives the epoch of one process; called only if rows came twice.
    """
    plans: list[Plan | None] = [r.plan for r in records]
    known = [p for p in plans if p is not None]
    if len(known) == len(plans) and len({(p.size, p.dataset) for p in known}) == 1:
        return _on_plans(known)
    seen = [_rows_of(_of_first_epoch(r)) for r in records]
    twice = {row for row in set().union(*seen) if sum(row in rank for rank in seen) > 1}
    if not twice:
        return None
    epoch = of_one_process()
    if epoch is None:
        return None
    times, total = Counter(epoch.rows), len(set().union(*seen))
    twice = {row for row in twice if times[row] < 2}
    if len(epoch.shapes) > 1 and len(twice) <= _MOST_EQUAL * total:
        return None
    return _overlap(len(twice), total, "recorded rows") if twice else None


def _on_plans(plans: list[Plan]) -> str | None:
    size, drawn = plans[0].size, sum(len(p.indices) for p in plans)
    if any(len(set(p.indices)) < len(p.indices) for p in plans):
        return None  # drawn with replacement: one process sees rows twice as well
    seen = Counter(i for p in plans for i in p.indices)
    overlap, missing = sum(c > 1 for c in seen.values()), size - len(seen)
    lines = []
    if overlap > max(0, drawn - size) or drawn - size >= len(plans):  # a tail that is filled up needs a few twice
        lines.append(_overlap(overlap, size, "rows"))
    if missing > max(0, size - drawn):  # a tail that is dropped, or a split that is not trained on, is missing in one process too
        lines.append(f"samples are left out: {missing} of {size} rows were seen by no rank in epoch 0")
    return "; ".join(lines) or None


def of_updates(records: list[RankRecord]) -> list[Seen]:
    """The samples of each update of the first epoch, over all ranks that have samples of their own."""
    updates: list[Seen] = []
    for of_ranks in zip(*(r.updates for r in records), strict=False):
        micros = [m for update in of_ranks for m in update]
        if any(m.epoch or m.weight <= 0 for m in micros):  # what weighs nothing may be padding, or samples without labels
            break
        updates.append(Seen())
        for micro in micros:
            updates[-1].add(micro.rows, micro.plain)
    return updates


def unlike_one_process(updates: list[Seen], one: Seen) -> str | None:
    """Which samples of the ranks are not those of one process; None if all are, or if they are padded otherwise.

    Args:
        updates: over all ranks.
        one: what one process has.
    """
    begin = 0
    for k, seen in enumerate(updates):
        end = begin + len(seen.rows)
        lacking = (Counter(seen.rows) - Counter(one.rows[begin:end])).total()
        if end <= len(one.rows) and lacking and len(seen.shapes | one.shapes) == 1:
            return f"update {k}: {lacking} of {len(seen.rows)} samples are not those that one process has for it"
        begin = end
    return None


def _overlap(count: int, total: int, what: str) -> str:
    return f"samples overlap: {count} of {total} {what} were seen by two ranks or more in epoch 0"


class SampleChecks:
    """Compares the samples of rows with those of one process, which are read once."""

    def __init__(self, on_ranks: OnRanks, folder: Path) -> None:
        self._on_ranks, self.folder = on_ranks, folder
        self._read: dict[int | None, Seen | None] = {}  # by one process: so many samples; None: an epoch
        self._size: int | None = None  # of its data set
        self._depends_on_hash: bool | None = None
        self._depends_on_seed: str | None = None
        self._keeps: str | None = None  # what reading changes of the data set, if samples depend on it

    def causes(self, result: Result, ran: RowRun, *, joined: bool) -> list[tuple[str, str]]:
        """The causes that the samples of a row show; adds notes to the result.

        Args:
            joined: the reference trained on joined batches.
        """
        ranks = [r for r in ran.records if not r.is_replica]
        if len(ranks) < 2:
            return []
        replay = self._on_ranks.replay(ran, self.folder)
        if (drew := ranks[0].drew_unseeded) and (seen := self._by_seed(ran)):
            return [("an RNG without a seed", f"{seen}: from {' and '.join(sorted(drew))}, from which it draws before it trains")]
        if ranks[0].hashes and self._by_hash(replay):
            seen = "the first batches or initial parameters change with PYTHONHASHSEED, which differs on ranks of other nodes"
            return [("samples that depend on the rank", seen)]
        others, divided, is_known = None, ranks[0].loader == "Loader", False
        if divided:
            updates = of_updates(ranks) if joined and not ranks[0].left_out else []
            one = self._of_one_process(replay, sum(len(seen.rows) for seen in updates)) or Seen()
            is_known = one.repeats
            others = self._divided_before(ranks) or (unlike_one_process(updates, one) if is_known else None)
        if joined and not is_known and (epoch := self._of_one_process(replay)) is not None:  # it may have another loader
            others = others or unlike_an_epoch(ranks if divided else ranks[:1], epoch)
        if self._keeps is not None:
            others = f"the data set's {self._keeps} changes as samples are read, and samples depend on it"
        if others is not None:
            return [("samples that depend on the rank", others)]
        note = note_on(ranks, lambda: self._of_one_process(replay))
        if note is not None and note.startswith("samples overlap"):
            return [("samples that ranks share", note)]
        if note is not None:
            result.notes.append(note)
        return []

    def _divided_before(self, ranks: list[RankRecord]) -> str | None:
        """Whether ranks have data sets of their own, although a Loader gives each rank only a share of its data set."""
        other = next((r for r in ranks if self._size not in (None, r.size)), None)
        looks = [r.seen_of_data for r in ranks]
        difference = None
        if other is not None:
            difference = f"rank {other.rank}: the data set has {other.size} samples, and {self._size} in one process"
        elif None not in looks and any(look != looks[0] for look in looks):
            difference = "ranks have data sets with other samples"
        return f"{difference}; give echelon.Loader the same data set on all ranks: it divides it" if difference else None

    def _by_seed(self, ran: RowRun) -> str:
        """What changes on a rank if RNGs that the script does not seed are seeded alike on all ranks before it trains."""
        if self._depends_on_seed is None:
            self._depends_on_seed, again = "", self.folder / "seeded-alike"
            with contextlib.suppress(RankFailedError):
                alike = self._on_ranks.row(replace(ran.row, seeded_alike=True, brief=True), again, ran.dtype)
                apart = [_apart(*both) for both in zip(ran.records, alike.records, strict=True)]
                if not apart[0]:  # rank 0 has the same seeds both times: if it draws others, nothing can be told
                    self._depends_on_seed = next((f"rank {rank} {what}" for rank, what in enumerate(apart) if what), "")
            shutil.rmtree(again, ignore_errors=True)
        return self._depends_on_seed

    def _by_hash(self, replay: Replay) -> bool:
        """Whether training begins differently with another order of sets of strings. Forked ranks all have the same order."""
        if self._depends_on_hash is None:
            file = self.folder / "begin.pkl"
            file.write_bytes(cloudpickle.dumps(replace(replay, row=Row("none", 1))))
            code = "import sys; from echelon.prover.samples import print_begin; print_begin(sys.argv[1])"
            path = os.pathsep.join(p for p in sys.path if p)

            def begun(*seeds: str) -> list[str]:
                runs = [
                    subprocess.Popen(
                        [sys.executable, "-P", "-c", code, str(file)],
                        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        text=True,
                    )
                    for seed in seeds
                ]
                return [run.communicate()[0].strip().rpartition("\n")[2] for run in runs]

            one, other = begun("1", "2")
            self._depends_on_hash = "" != one != other != "" and begun("1") == [one]
        return self._depends_on_hash

    def _of_one_process(self, replay: Replay, count: int | None = None) -> Seen | None:
        """The first samples of one process, or its epoch; None if reading takes too long, or fails."""
        if count is not None:  # more will do
            count = next((known for known in self._read if known is not None and known >= count), count)
        if count not in self._read:
            self._read[count] = None
            with contextlib.suppress(RankFailedError):
                read = self._on_ranks.launch(read_alone, 1, replay, count)
                self._read[count], self._keeps = read["seen"], read["keeps"]
                self._size = read["size"] if count is not None else self._size
        return self._read[count]


def _apart(one: RankRecord, other: RankRecord) -> str:
    """What differs between two runs of one rank; "" if nothing does."""
    own_micros, others = one.micros, other.micros
    if any(digest(a.plain) != digest(b.plain) for a, b in zip(own_micros, others, strict=False)):
        return "has samples of its own"
    first, second = (micros[0].loss if micros else None for micros in (own_micros, others))
    is_apart = first is not None and second is not None and abs(first - second) > _SAME_LOSS * abs(second)
    return "computes its loss with numbers of its own" if is_apart else ""
